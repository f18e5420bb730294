#pragma once
// What benchmarks have in common.

#include <algorithm>
#include <vector>

namespace tessera::bench {

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace tessera::bench
