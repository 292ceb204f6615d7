// Drives a fuzz target where libFuzzer is absent: mutates valid files and hands them over.
//
//   gguf_fuzz_standalone [--runs N] [--first N] [--seed S] [FILE...]
//   gguf_fuzz_standalone --write FOLDER        only writes the seeds, for libFuzzer to begin with
//
// Without files the seeds are made here. Every run draws from a generator that is keyed by seed
// and run, so a failure, which prints both, is replayed alone with `--first RUN --runs 1`. The
// input of a run has a buffer of exactly its size; the address sanitizer sees every byte beyond.

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tests/gguf_writer.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
// Called by the sanitizers before they end the process; null in a build without them.
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());

namespace {

using kvledger::gguf::TensorType;
using kvledger::gguf::ValueType;
using kvledger::testing::GgufWriter;

using Bytes = std::vector<std::byte>;
using Clock = std::chrono::steady_clock;

// Inputs have some kilobytes; whatever takes this long for one of them does not end.
constexpr std::chrono::seconds kRunTimeMax{2};
// Mutations may lengthen an input up to here.
constexpr std::size_t kInputBytesMax = 1U << 16;

struct Seed {
  Bytes bytes;
  std::vector<GgufWriter::Field> fields;  // empty where unknown
};

struct Options {
  std::uint64_t runs = 100000;
  std::uint64_t first = 0;
  std::uint64_t seed = 1;
  std::string write_folder;
  std::vector<std::string> files;
};

// splitmix64: a few lines that give the same numbers everywhere.
class Random {
 public:
  explicit Random(std::uint64_t seed) noexcept : state_(seed) {}

  std::uint64_t next() noexcept {
    state_ += 0x9e3779b97f4a7c15;
    std::uint64_t mixed = state_;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
    return mixed ^ (mixed >> 31);
  }
  // From 0 to count - 1.
  std::size_t below(std::size_t count) noexcept { return next() % count; }

 private:
  std::uint64_t state_;
};

Seed seed_of(const GgufWriter& writer) {
  return {writer.bytes(), writer.fields()};
}

// Every type of value, several types of tensors, an alignment that is not the default.
Seed seed_of_all_types() {
  GgufWriter writer(4, 20);
  writer.entry("general.architecture", "llama")
      .entry("general.alignment", ValueType::kU32, std::uint32_t{64})
      .entry("a", ValueType::kU8, std::uint8_t{1})
      .entry("b", ValueType::kI8, std::int8_t{-1})
      .entry("c", ValueType::kU16, std::uint16_t{2})
      .entry("d", ValueType::kI16, std::int16_t{-2})
      .entry("e", ValueType::kI32, std::int32_t{-3})
      .entry("f", ValueType::kF32, 0.5F)
      .entry("g", ValueType::kBool, std::uint8_t{1})
      .entry("h", ValueType::kU64, std::uint64_t{4})
      .entry("i", ValueType::kI64, std::int64_t{-4})
      .entry("j", ValueType::kF64, 0.25);
  writer.array("k", ValueType::kString, 4).text("the").text("").text("\xc4\xa0").text("\n");
  writer.array("l", ValueType::kF32, 2).put(1.0F).put(2.0F);
  writer.array("m", ValueType::kI32, 2).put(-1).put(1);
  writer.array("n", ValueType::kBool, 3).raw(std::string_view("\1\0\1", 3));
  writer.array("o", ValueType::kU8, 2).raw("xy");
  writer.array("p", ValueType::kU64, 1).put(std::uint64_t{5});
  writer.array("q", ValueType::kString, 0);
  writer.array("r", ValueType::kI16, 1).put(std::int16_t{6});
  return seed_of(writer.tensor("token_embd.weight", {32, 3}, TensorType::kQ8_0, 0)
                     .tensor("blk.0.attn_norm.weight", {8}, TensorType::kF32, 128)
                     .tensor("blk.0.ffn_up.weight", {256, 2}, TensorType::kQ4_K, 192)
                     .tensor("blk.0.attn_q.weight", {4, 2, 1, 3}, TensorType::kBF16, 512)
                     .data(512 + 48, 64));
}

// The second version, and tensors enough to overlap.
Seed seed_of_many_tensors() {
  constexpr std::uint64_t kCount = 24;
  GgufWriter writer(kCount, 1, 2);
  writer.entry("general.name", "many");
  for (std::uint64_t i = 0; i < kCount; ++i) {
    writer.tensor(std::to_string(i), {32, 1 + i % 2}, TensorType::kQ4_1, 64 * i);
  }
  return seed_of(writer.data(64 * kCount));
}

std::vector<Seed> seeds_from(const std::vector<std::string>& files) {
  if (files.empty()) {
    return {seed_of_all_types(), seed_of_many_tensors()};
  }
  std::vector<Seed> seeds;
  for (const std::string& file : files) {
    std::ifstream stream(file, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(stream), {}};
    const auto bytes = std::as_bytes(std::span(text));
    seeds.push_back({Bytes(bytes.begin(), bytes.end()), {}});
  }
  return seeds;
}

// Numbers at which arithmetic wraps, signs turn or limits lie, and near misses of `value`.
std::uint64_t extreme(Random& random, std::uint64_t value, std::uint64_t size) {
  const auto bit = [&random] { return std::uint64_t{1} << random.below(64); };
  switch (random.below(10)) {
    case 0:
      return 0;
    case 1:
      return value + 1;
    case 2:
      return value - 1;
    case 3:
      return bit();
    case 4:
      return bit() - 1;
    case 5:
      return ~std::uint64_t{0} - random.below(65);
    case 6:
      return size - random.below(65);
    case 7:
      return size + random.below(65);
    case 8:
      return random.below(33);
    default:
      return value ^ bit();
  }
}

void replace_number(Random& random, Bytes& bytes, const std::vector<GgufWriter::Field>& fields) {
  GgufWriter::Field field{random.below(bytes.size()), std::size_t{1} << random.below(4)};
  if (!fields.empty() && random.below(8) != 0) {
    field = fields[random.below(fields.size())];
  }
  if (field.offset >= bytes.size() || field.bytes > bytes.size() - field.offset) {
    return;
  }
  std::uint64_t value = 0;
  std::memcpy(&value, bytes.data() + field.offset, field.bytes);
  value = extreme(random, value, bytes.size());
  std::memcpy(bytes.data() + field.offset, &value, field.bytes);
}

// Copies a run of `source` into `bytes`, over what is there or between it.
void splice(Random& random, Bytes& bytes, const Bytes& source) {
  const std::size_t from = random.below(source.size());
  const std::size_t count = 1 + random.below(std::min<std::size_t>(source.size() - from, 128));
  const std::size_t to = random.below(bytes.size());
  const auto begin = source.begin() + static_cast<std::ptrdiff_t>(from);
  if (random.below(2) == 0 && bytes.size() + count <= kInputBytesMax) {
    const Bytes run(begin, begin + static_cast<std::ptrdiff_t>(count));
    bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(to), run.begin(), run.end());
  } else {
    const std::size_t fitting = std::min(count, bytes.size() - to);
    std::memmove(bytes.data() + to, source.data() + from, fitting);
  }
}

void mutate(Random& random, Bytes& bytes, const Seed& seed, const Seed& other) {
  if (bytes.empty()) {
    return;
  }
  const std::size_t at = random.below(bytes.size());
  switch (random.below(12)) {
    case 0:
      bytes[at] ^= std::byte{1} << random.below(8);
      break;
    case 1:
      bytes[at] = static_cast<std::byte>(random.next());
      break;
    case 2:
      bytes.resize(at);
      break;
    case 3: {
      const std::size_t count = 1 + random.below(std::min<std::size_t>(bytes.size() - at, 64));
      const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(at);
      bytes.erase(begin, begin + static_cast<std::ptrdiff_t>(count));
      break;
    }
    case 4:
      splice(random, bytes, other.bytes);
      break;
    case 5:
      splice(random, bytes, Bytes(bytes));
      break;
    default:
      replace_number(random, bytes, seed.fields);
  }
}

std::uint64_t current_seed = 0;
std::uint64_t current_run = 0;

void print_replay() {
  std::array<char, 128> line;
  const int length = std::snprintf(
      line.data(), line.size(), "failed; replay with --seed %llu --first %llu --runs 1\n",
      static_cast<unsigned long long>(current_seed), static_cast<unsigned long long>(current_run));
  [[maybe_unused]] const auto written =
      write(STDERR_FILENO, line.data(), static_cast<std::size_t>(length));
}

void on_signal(int signal) {
  print_replay();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void report_failures() {
  std::signal(SIGABRT, &on_signal);
  if (&__sanitizer_set_death_callback != nullptr) {
    __sanitizer_set_death_callback(&print_replay);
  } else {
    std::signal(SIGSEGV, &on_signal);
    std::signal(SIGBUS, &on_signal);
    std::signal(SIGFPE, &on_signal);
  }
}

Bytes input_of(std::uint64_t run, std::uint64_t seed, const std::vector<Seed>& seeds) {
  Random random(seed * 0xd1342543de82ef95 + run);
  const Seed& base = seeds[random.below(seeds.size())];
  const Seed& other = seeds[random.below(seeds.size())];
  Bytes bytes = base.bytes;
  for (std::size_t left = random.below(4) + 1; left > 0; --left) {
    mutate(random, bytes, base, other);
  }
  return bytes;
}

// The time that the target took.
Clock::duration run_once(const Bytes& bytes) {
  const std::unique_ptr<std::uint8_t[]> exact(new std::uint8_t[bytes.size()]);
  if (!bytes.empty()) {
    std::memcpy(exact.get(), bytes.data(), bytes.size());
  }
  const auto start = Clock::now();
  LLVMFuzzerTestOneInput(exact.get(), bytes.size());
  return Clock::now() - start;
}

Options options_of(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    std::uint64_t* number = word == "--runs"    ? &options.runs
                            : word == "--first" ? &options.first
                            : word == "--seed"  ? &options.seed
                                                : nullptr;
    if (number != nullptr && i + 1 < argc) {
      *number = std::strtoull(argv[++i], nullptr, 10);
    } else if (word == "--write" && i + 1 < argc) {
      options.write_folder = argv[++i];
    } else {
      options.files.emplace_back(word);
    }
  }
  return options;
}

bool write_seeds(const std::vector<Seed>& seeds, const std::string& folder) {
  for (std::size_t i = 0; i < seeds.size(); ++i) {
    std::ofstream stream(folder + "/seed" + std::to_string(i), std::ios::binary);
    stream.write(reinterpret_cast<const char*>(seeds[i].bytes.data()),
                 static_cast<std::streamsize>(seeds[i].bytes.size()));
    if (!stream.flush()) {
      std::fprintf(stderr, "a seed cannot be written\n");
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = options_of(argc, argv);
  const std::vector<Seed> seeds = seeds_from(options.files);
  for (const Seed& seed : seeds) {
    if (seed.bytes.empty()) {
      std::fprintf(stderr, "a seed file is missing or empty\n");
      return 2;
    }
  }
  if (!options.write_folder.empty()) {
    return write_seeds(seeds, options.write_folder) ? 0 : 2;
  }
  current_seed = options.seed;
  report_failures();
  Clock::duration slowest{0};
  for (std::uint64_t i = 0; i < options.runs; ++i) {
    current_run = options.first + i;
    const Clock::duration taken = run_once(input_of(current_run, options.seed, seeds));
    slowest = std::max(slowest, taken);
    if (taken > kRunTimeMax) {
      std::fprintf(stderr, "a run took too long\n");
      print_replay();
      return 1;
    }
  }
  std::printf("runs %llu, seed %llu, slowest %.3f ms\n",
              static_cast<unsigned long long>(options.runs),
              static_cast<unsigned long long>(options.seed),
              std::chrono::duration<double, std::milli>(slowest).count());
  return 0;
}
