#include "core/gguf.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "core/gguf_cursor.h"

namespace kvledger::gguf {
namespace {

// The shortest entry: a key of one byte, its type, a value of one byte.
constexpr std::uint64_t kEntryBytesMin = 8 + 1 + 4 + 1;
// The shortest tensor: a name of one byte and one dimension.
constexpr std::uint64_t kTensorBytesMin = 8 + 1 + 4 + 8 + 4 + 8;
// The shortest string of an array: its length.
constexpr std::uint64_t kStringBytesMin = 8;

// Every table is reserved only after its length was compared with the bytes that are left. The
// largest sum is a table of entries for a whole file whose first entry claims all of it again as
// an array of strings: below the six times that gguf.h promises.
static_assert(sizeof(MetadataEntry) < 4 * kEntryBytesMin);
static_assert(sizeof(Tensor) < 3 * kTensorBytesMin);
static_assert(sizeof(Strings::value_type) <= 2 * kStringBytesMin);

// The product, or nothing where 64 bits do not hold it.
std::optional<std::uint64_t> product(std::uint64_t a, std::uint64_t b) noexcept {
  if (a != 0 && b > std::numeric_limits<std::uint64_t>::max() / a) {
    return std::nullopt;
  }
  return a * b;
}

// An item whose name an earlier one has, or null. Sorting keeps a hostile choice of names from
// costing more than O(n log n) comparisons.
template <class Item, class Name>
const Item* repeated(const std::vector<Item>& items, Name name_of) {
  std::vector<const Item*> order(items.size());
  std::transform(items.begin(), items.end(), order.begin(), [](const Item& item) { return &item; });
  std::sort(order.begin(), order.end(), [&](const Item* a, const Item* b) {
    const int names = name_of(*a).compare(name_of(*b));
    return names != 0 ? names < 0 : a < b;
  });
  const auto first =
      std::adjacent_find(order.begin(), order.end(),
                         [&](const Item* a, const Item* b) { return name_of(*a) == name_of(*b); });
  return first == order.end() ? nullptr : *(first + 1);
}

// One pass over the bytes. What returns bool returns false once the cursor holds the error.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) noexcept : cursor_(bytes) {}

  // The phases in the order of the file.
  Result run() {
    if (header() && metadata() && alignment() && tensors() && placement() && separation()) {
      return std::move(file_);
    }
    return std::move(cursor_).error();
  }

 private:
  bool header();
  bool metadata();
  bool alignment();
  bool tensors();
  bool placement();
  bool separation();

  bool entry(MetadataEntry& entry);
  bool array(Value& value);
  template <class T>
  bool elements(std::uint64_t count, Value& value);
  bool strings(std::uint64_t count, Value& value);
  bool truths(std::uint64_t count, Value& value);

  bool tensor(Tensor& tensor);
  bool shape(Tensor& tensor);
  bool size(Tensor& tensor, const TensorTypeTraits& traits);

  // Words a sentence about an item read earlier, at the place where it begins.
  template <class... Parts>
  bool fail_entry(const MetadataEntry& entry, const Parts&... parts) {
    cursor_.begin(subject(file_.metadata, entry, "metadata entry "));
    cursor_.name(entry.key);
    return cursor_.fail(cursor_.position_of(entry.key) - sizeof(std::uint64_t), parts...);
  }
  template <class... Parts>
  bool fail_tensor(const Tensor& tensor, const Parts&... parts) {
    cursor_.begin(subject(file_.tensors, tensor, "tensor "));
    cursor_.name(tensor.name);
    return cursor_.fail(cursor_.position_of(tensor.name) - sizeof(std::uint64_t), parts...);
  }
  template <class Item>
  static std::string subject(const std::vector<Item>& items, const Item& item, const char* kind) {
    return kind + std::to_string(&item - items.data());
  }

  Cursor cursor_;
  std::uint64_t entry_count_ = 0;
  std::uint64_t tensor_count_ = 0;
  File file_;
};

bool Reader::header() {
  constexpr std::array<char, 4> kMagic = {'G', 'G', 'U', 'F'};
  cursor_.begin("header");
  std::array<char, 4> magic = {};
  if (!cursor_.number(magic)) {
    return false;
  }
  if (magic != kMagic) {
    return cursor_.fail(0, "the file does not begin with the letters GGUF");
  }
  std::uint64_t at = cursor_.position();
  if (!cursor_.number(file_.version)) {
    return false;
  }
  if (file_.version != 0 && file_.version << 16 == 0) {
    return cursor_.fail(at, "the file is big endian and only little endian can be read");
  }
  if (file_.version < kVersionMin || file_.version > kVersionMax) {
    return cursor_.fail(at, "version ", file_.version, " cannot be read, only ", kVersionMin,
                        " to ", kVersionMax);
  }
  at = cursor_.position();
  if (!cursor_.number(tensor_count_) || !cursor_.number(entry_count_)) {
    return false;
  }
  if (tensor_count_ > kTensorsMax) {
    return cursor_.fail(at, tensor_count_, " tensors are more than the limit of ", kTensorsMax);
  }
  if (entry_count_ > kMetadataEntriesMax) {
    return cursor_.fail(at + sizeof(tensor_count_), entry_count_,
                        " metadata entries are more than the limit of ", kMetadataEntriesMax);
  }
  return true;
}

bool Reader::metadata() {
  if (!cursor_.fits(entry_count_, kEntryBytesMin, "metadata entries")) {
    return false;
  }
  file_.metadata.reserve(entry_count_);
  for (std::uint64_t i = 0; i < entry_count_; ++i) {
    cursor_.begin("metadata entry " + std::to_string(i));
    if (!entry(file_.metadata.emplace_back())) {
      return false;
    }
  }
  const auto* second = repeated(file_.metadata, [](const auto& entry) { return entry.key; });
  return second == nullptr || fail_entry(*second, "an earlier entry has the same key");
}

bool Reader::entry(MetadataEntry& entry) {
  std::uint64_t at = cursor_.position();
  if (!cursor_.string(entry.key, kKeyBytesMax)) {
    return false;
  }
  if (entry.key.empty() || !is_printable(entry.key)) {
    return cursor_.fail(at, "a key must be printable ASCII and not empty");
  }
  cursor_.name(entry.key);
  at = cursor_.position();
  std::uint32_t type = 0;
  if (!cursor_.number(type)) {
    return false;
  }
  if (type == static_cast<std::uint32_t>(ValueType::kArray)) {
    return array(entry.value);
  }
  return cursor_.with_type(type, at, [&]<class T>() {
    if constexpr (std::is_same_v<T, std::string_view>) {
      return cursor_.string(entry.value.emplace<T>(), kStringBytesMax);
    } else if constexpr (std::is_same_v<T, bool>) {
      return cursor_.truth(entry.value.emplace<T>());
    } else {
      return cursor_.number(entry.value.emplace<T>());
    }
  });
}

bool Reader::array(Value& value) {
  std::uint64_t at = cursor_.position();
  std::uint32_t type = 0;
  std::uint64_t count = 0;
  if (!cursor_.number(type) || !cursor_.number(count)) {
    return false;
  }
  if (count > kArrayElementsMax) {
    return cursor_.fail(at + sizeof(type), "an array of ", count,
                        " elements is longer than the limit of ", kArrayElementsMax);
  }
  return cursor_.with_type(type, at, [&]<class T>() {
    if constexpr (std::is_same_v<T, std::string_view>) {
      return strings(count, value);
    } else if constexpr (std::is_same_v<T, bool>) {
      return truths(count, value);
    } else {
      return elements<T>(count, value);
    }
  });
}

template <class T>
bool Reader::elements(std::uint64_t count, Value& value) {
  if (!cursor_.fits(count, sizeof(T), "elements of an array")) {
    return false;
  }
  value.emplace<Packed<T>>(cursor_.take(count * sizeof(T)));
  return true;
}

bool Reader::strings(std::uint64_t count, Value& value) {
  if (!cursor_.fits(count, kStringBytesMin, "strings")) {
    return false;
  }
  Strings& strings = value.emplace<Strings>();
  strings.reserve(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    if (!cursor_.string(strings.emplace_back(), kStringBytesMax)) {
      return false;
    }
  }
  return true;
}

bool Reader::truths(std::uint64_t count, Value& value) {
  const std::uint64_t at = cursor_.position();
  if (!elements<bool>(count, value)) {
    return false;
  }
  const auto bytes = std::get<Packed<bool>>(value).bytes();
  const auto wrong =
      std::find_if(bytes.begin(), bytes.end(), [](auto b) { return b > std::byte{1}; });
  return wrong == bytes.end() ||
         cursor_.fail(at + static_cast<std::uint64_t>(wrong - bytes.begin()), "a bool is ",
                      std::to_integer<unsigned>(*wrong), ", neither 0 nor 1");
}

// The entry that says how tensors are aligned may stand anywhere among the others.
bool Reader::alignment() {
  for (const MetadataEntry& entry : file_.metadata) {
    if (entry.key != "general.alignment") {
      continue;
    }
    const auto* alignment = std::get_if<std::uint32_t>(&entry.value);
    if (alignment == nullptr) {
      return fail_entry(entry, "the alignment is not an unsigned number of 32 bits");
    }
    if (!std::has_single_bit(*alignment) || *alignment > kAlignmentMax) {
      return fail_entry(entry, "the alignment of ", *alignment, " is not a power of two from 1 to ",
                        kAlignmentMax);
    }
    file_.alignment = *alignment;
  }
  return true;
}

bool Reader::tensors() {
  cursor_.begin("header");
  if (!cursor_.fits(tensor_count_, kTensorBytesMin, "tensors")) {
    return false;
  }
  file_.tensors.reserve(tensor_count_);
  for (std::uint64_t i = 0; i < tensor_count_; ++i) {
    cursor_.begin("tensor " + std::to_string(i));
    if (!tensor(file_.tensors.emplace_back())) {
      return false;
    }
  }
  const auto* second = repeated(file_.tensors, [](const auto& tensor) { return tensor.name; });
  return second == nullptr || fail_tensor(*second, "an earlier tensor has the same name");
}

bool Reader::tensor(Tensor& tensor) {
  std::uint64_t at = cursor_.position();
  if (!cursor_.string(tensor.name, kTensorNameBytesMax)) {
    return false;
  }
  if (tensor.name.empty()) {
    return cursor_.fail(at, "a tensor must have a name");
  }
  cursor_.name(tensor.name);
  if (!shape(tensor)) {
    return false;
  }
  at = cursor_.position();
  std::uint32_t type = 0;
  if (!cursor_.number(type)) {
    return false;
  }
  const TensorTypeTraits* traits = tensor_type_numbered(type);
  if (traits == nullptr) {
    return cursor_.fail(at, "tensor type ", type, " cannot be read");
  }
  tensor.type = traits->type;
  return cursor_.number(tensor.offset) && size(tensor, *traits);
}

bool Reader::shape(Tensor& tensor) {
  std::uint64_t at = cursor_.position();
  if (!cursor_.number(tensor.dimension_count)) {
    return false;
  }
  if (tensor.dimension_count < 1 || tensor.dimension_count > kDimensionsMax) {
    return cursor_.fail(at, tensor.dimension_count, " dimensions are not from 1 to ",
                        kDimensionsMax);
  }
  for (std::uint32_t i = 0; i < tensor.dimension_count; ++i) {
    at = cursor_.position();
    if (!cursor_.number(tensor.dimensions[i])) {
      return false;
    }
    if (tensor.dimensions[i] == 0) {
      return cursor_.fail(at, "dimension ", i, " is 0");
    }
  }
  return true;
}

// Rows are stored in whole groups, so the bytes follow from the dimensions.
bool Reader::size(Tensor& tensor, const TensorTypeTraits& traits) {
  const std::uint64_t row = tensor.dimensions[0];
  if (row % traits.group.elements != 0) {
    return fail_tensor(tensor, "a row of ", row, " elements is not a whole number of ", traits.name,
                       " groups of ", traits.group.elements);
  }
  std::optional<std::uint64_t> elements = 1;
  for (const std::uint64_t dimension : tensor.shape()) {
    elements = elements ? product(*elements, dimension) : std::nullopt;
  }
  const std::optional<std::uint64_t> bytes =
      elements ? product(*elements / traits.group.elements, traits.group.bytes) : std::nullopt;
  if (!bytes) {
    return fail_tensor(tensor, "its size is more than 64 bits can count");
  }
  tensor.bytes = *bytes;
  return true;
}

// In the file, offsets count from the first aligned byte after the descriptions.
bool Reader::placement() {
  if (file_.tensors.empty()) {
    return true;
  }
  const std::uint64_t past = cursor_.position() % file_.alignment;
  const std::uint64_t padding = past == 0 ? 0 : file_.alignment - past;
  cursor_.begin("header");
  if (!cursor_.fits(padding, 1, "bytes of padding before the tensor data")) {
    return false;
  }
  cursor_.take(padding);
  for (Tensor& tensor : file_.tensors) {
    if (tensor.offset % file_.alignment != 0) {
      return fail_tensor(tensor, "its offset of ", tensor.offset, " is not a multiple of ",
                         file_.alignment);
    }
    if (tensor.offset > cursor_.left() || tensor.bytes > cursor_.left() - tensor.offset) {
      return fail_tensor(tensor, tensor.bytes, " bytes at offset ", tensor.offset,
                         " are not all among the ", cursor_.left(), " bytes of tensor data");
    }
    tensor.offset += cursor_.position();
  }
  return true;
}

// No byte belongs to two tensors.
bool Reader::separation() {
  std::vector<const Tensor*> order(file_.tensors.size());
  std::transform(file_.tensors.begin(), file_.tensors.end(), order.begin(),
                 [](const Tensor& tensor) { return &tensor; });
  std::sort(order.begin(), order.end(), [](const Tensor* a, const Tensor* b) {
    return std::pair(a->offset, a) < std::pair(b->offset, b);
  });
  const auto overlap = std::adjacent_find(
      order.begin(), order.end(),
      [](const Tensor* a, const Tensor* b) { return b->offset - a->offset < a->bytes; });
  return overlap == order.end() ||
         fail_tensor(**(overlap + 1), "it overlaps tensor ", *overlap - file_.tensors.data());
}

}  // namespace

const Value* File::find(std::string_view key) const noexcept {
  const auto found = std::find_if(metadata.begin(), metadata.end(),
                                  [key](const MetadataEntry& entry) { return entry.key == key; });
  return found == metadata.end() ? nullptr : &found->value;
}

Result read(std::span<const std::byte> bytes) {
  return Reader(bytes).run();
}

}  // namespace kvledger::gguf
