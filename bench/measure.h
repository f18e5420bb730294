#pragma once
// Helpers of all benchmarks.

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tessera::bench {

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Seconds of the same work done in several ways, by the way's name.
using TimesByWay = std::map<std::string, std::vector<double>>;

// The way with the smallest median, and that median.
inline std::pair<std::string, double> fastest(const TimesByWay& times) {
  std::pair<std::string, double> best;
  for (const auto& [way, values] : times) {
    if (best.first.empty() || median(values) < best.second) best = {way, median(values)};
  }
  return best;
}

}  // namespace tessera::bench
