#include "tessera/checkpoint/inspect/stats.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <mutex>
#include <utility>

#include "checkpoint/buffer.h"
#include "checkpoint/inspect/element_stats.h"
#include "checkpoint/inspect/numbers.h"
#include "checkpoint/inspect/pieces.h"
#include "checkpoint/source/expansion.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/tensor_reader.h"

namespace tessera::checkpoint {
namespace {

// Small enough that the bytes are still in the second cache when they are summarized.
constexpr std::int64_t kStatsPieceBytes = 1 << 20;

// The statistics of one tensor. Pieces end in any order and are merged in row-major order.
class TensorWork {
 public:
  TensorWork(const std::shared_ptr<const Checkpoint>& checkpoint, std::size_t tensor) : reader_(checkpoint, tensor) {}

  void add(const Box& piece, std::int64_t begin) {
    const DType dtype = reader_.info().dtype;
    thread_local Buffer buffer;
    const MutableByteView bytes = buffer.get(static_cast<std::size_t>(volume(piece) * dtype_size(dtype)));
    reader_.read(piece, bytes);
    if (number_kind(dtype) == NumberKind::none) return;
    const ElementStats stats = element_stats(dtype, bytes.data(), volume(piece));
    const std::lock_guard lock(mutex_);
    waiting_.emplace(begin, std::pair(volume(piece), stats));
    while (!waiting_.empty() && waiting_.begin()->first == merged_) {
      merged_ += waiting_.begin()->second.first;
      all_.merge(waiting_.begin()->second.second);
      waiting_.erase(waiting_.begin());
    }
  }

  ElementStats finish() const {
    reader_.verify_checksums();
    return all_;
  }

 private:
  const TensorReader reader_;
  std::mutex mutex_;
  std::map<std::int64_t, std::pair<std::int64_t, ElementStats>> waiting_;  // by the first element: number of elements
  std::int64_t merged_ = 0;                                                // elements
  ElementStats all_;
};

std::vector<std::size_t> chosen_tensors(const Checkpoint& checkpoint, const StatsOptions& options) {
  std::vector<std::size_t> chosen;
  const auto add = [&](std::size_t i) {
    if (options.selection.takes(checkpoint.tensors()[i].name)) chosen.push_back(i);
  };
  if (options.tensors) {
    for (const std::size_t i : *options.tensors) add(i);
  } else {
    for (std::size_t i = 0; i < checkpoint.tensors().size(); ++i) add(i);
  }
  return chosen;
}

struct NumberText {
  std::string operator()(std::complex<double> value) const {
    const std::string imaginary = fmt::format("{}", value.imag());
    return fmt::format("({}{}{}j)", value.real(), imaginary.starts_with('-') ? "" : "+", imaginary);
  }
  template <typename T>
  std::string operator()(T value) const {
    return fmt::format("{}", value);
  }
};

constexpr std::array<std::pair<std::string_view, StatsKey>, 10> kKeys = {{{"name", StatsKey::name},
                                                                          {"size", StatsKey::size},
                                                                          {"min", StatsKey::min},
                                                                          {"max", StatsKey::max},
                                                                          {"mean", StatsKey::mean},
                                                                          {"std", StatsKey::stddev},
                                                                          {"norm", StatsKey::norm},
                                                                          {"zeros", StatsKey::zeros},
                                                                          {"nan", StatsKey::nan},
                                                                          {"inf", StatsKey::inf}}};

// long double has the 64 bits of every integer.
std::optional<long double> sortable(const std::optional<Number>& number) {
  if (!number) return std::nullopt;
  const auto value = std::visit(
      [](auto v) -> long double {
        if constexpr (std::is_same_v<decltype(v), std::complex<double>>) {
          return std::hypot(v.real(), v.imag());
        } else {
          return static_cast<long double>(v);
        }
      },
      *number);
  return std::isnan(value) ? std::nullopt : std::optional(value);
}

std::optional<long double> sortable(const std::optional<double>& number) {
  return number && !std::isnan(*number) ? std::optional<long double>(*number) : std::nullopt;
}

// Returns what a tensor is sorted by, the largest first.
std::optional<long double> rank_of(const TensorStats& tensor, StatsKey key) {
  switch (key) {
    case StatsKey::name:
      return 0;
    case StatsKey::size:
      return static_cast<long double>(tensor.size_bytes);
    case StatsKey::min: {
      const auto least = sortable(tensor.min);
      return least ? std::optional(-*least) : std::nullopt;
    }
    case StatsKey::max:
      return sortable(tensor.max);
    case StatsKey::mean:
      return sortable(tensor.mean);
    case StatsKey::stddev:
      return sortable(tensor.stddev);
    case StatsKey::norm:
      return sortable(tensor.norm);
    case StatsKey::zeros:
      return static_cast<long double>(tensor.zeros);
    case StatsKey::nan:
      return static_cast<long double>(tensor.nans);
    case StatsKey::inf:
      return static_cast<long double>(tensor.infs);
  }
  return std::nullopt;
}

}  // namespace

std::string to_string(const Number& number) { return std::visit(NumberText(), number); }

StatsReport stats(const std::shared_ptr<const Checkpoint>& checkpoint, const StatsOptions& options) {
  const std::vector<std::size_t> chosen = chosen_tensors(*checkpoint, options);
  if (!options.expand) check_expansion(*checkpoint, chosen);
  std::vector<ElementStats> found(chosen.size());
  StatsReport report;
  for (const std::size_t i : chosen) report.bytes += checkpoint->tensors()[i].size_bytes();
  Workers workers(options.jobs, options.progress, options.cancellation);
  workers.progress.begin("read", report.bytes);
  for (std::size_t k = 0; k < chosen.size(); ++k) {
    checkpoint->check_partition(chosen[k]);
    const auto work = std::make_shared<TensorWork>(checkpoint, chosen[k]);
    workers.submit_pieces(
        checkpoint->tensors()[chosen[k]], kStatsPieceBytes,
        [work](const Box& piece, std::int64_t begin) { work->add(piece, begin); },
        [work, &found, k] { found[k] = work->finish(); });
  }
  workers.pool.wait();
  checkpoint->compare_rest();
  workers.progress.end();
  Moments all;
  bool any_inf = false;
  for (std::size_t k = 0; k < chosen.size(); ++k) {
    const TensorInfo& info = checkpoint->tensors()[chosen[k]];
    TensorStats tensor{info.name, info.dtype, info.shape, info.size_bytes()};
    tensor.is_numeric = number_kind(info.dtype) != NumberKind::none;
    if (tensor.is_numeric) found[k].finish(info.dtype, tensor);
    report.elements += tensor.elements;
    report.nans += tensor.nans;
    report.infs += tensor.infs;
    report.zeros += tensor.zeros;
    all.merge(found[k].real.finite);
    all.merge(found[k].imaginary.finite);
    any_inf = any_inf || tensor.infs > 0;
    report.tensors.push_back(std::move(tensor));
  }
  report.norm = any_inf ? std::numeric_limits<double>::infinity() : all.norm();
  return report;
}

std::optional<StatsKey> find_stats_key(std::string_view name) {
  for (const auto& [text, key] : kKeys) {
    if (text == name) return key;
  }
  return std::nullopt;
}

void sort_stats(std::vector<TensorStats>& tensors, StatsKey key) {
  std::sort(tensors.begin(), tensors.end(), [key](const TensorStats& a, const TensorStats& b) {
    const auto rank_a = rank_of(a, key), rank_b = rank_of(b, key);
    if (rank_a != rank_b) return rank_a > rank_b;  // nothing is the least
    return a.name < b.name;
  });
}

}  // namespace tessera::checkpoint
