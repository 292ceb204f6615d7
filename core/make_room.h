// Memory taken before it is needed, so that what must not fail halfway cannot.
//
// A class that changes several things together makes room in all of them first: where that throws
// std::bad_alloc, nothing has changed yet. Room grows in doubles, so it costs nothing on average.

#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace kvledger {

// Lets `values` reach `count` elements without allocating.
template <class T>
void make_room(std::vector<T>& values, std::size_t count) {
  if (values.capacity() < count) {
    values.reserve(std::max(count, 2 * values.capacity()));
  }
}

}  // namespace kvledger
