#include "tessera/checkpoint/diff.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>

#include "checkpoint/buffer.h"
#include "checkpoint/convert/output_plan.h"
#include "checkpoint/inspect/compare_elements.h"
#include "checkpoint/inspect/numbers.h"
#include "checkpoint/inspect/pieces.h"
#include "checkpoint/source/expansion.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/tensor_reader.h"
#include "tessera/format/python_value.h"

namespace tessera::checkpoint {
namespace {

// Small enough that the bytes of both sides are still in the second cache when they are compared.
constexpr std::int64_t kDiffPieceBytes = 512 << 10;
constexpr std::size_t kShownValue = 200;

// Compares one tensor piece by piece.
struct TensorDiff {
  TensorDiff(const std::shared_ptr<const Checkpoint>& checkpoint_a, std::size_t index_a,
             const std::shared_ptr<const Checkpoint>& checkpoint_b, std::size_t index_b)
      : a(checkpoint_a, index_a), b(checkpoint_b, index_b) {}
  TensorReader a, b;
  std::mutex mutex;
  ElementDifferences found;

  void compare(const Box& piece, std::int64_t begin, const std::optional<Tolerance>& tolerance) {
    const std::int64_t count = volume(piece);
    const Elements side_a{a.info().dtype, read(a, piece, 0)}, side_b{b.info().dtype, read(b, piece, 1)};
    const ElementDifferences here = compare_elements(side_a, side_b, count, begin, tolerance);
    if (here.count == 0) return;
    const std::lock_guard lock(mutex);
    found.merge(here);
  }

 private:
  static const std::uint8_t* read(const TensorReader& reader, const Box& piece, std::size_t side) {
    thread_local std::array<Buffer, 2> buffers;
    const MutableByteView bytes =
        buffers[side].get(static_cast<std::size_t>(volume(piece) * dtype_size(reader.info().dtype)));
    reader.read(piece, bytes);
    return bytes.data();
  }
};

std::vector<std::int64_t> unflatten(std::int64_t flat, const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> index(shape.size());
  for (std::size_t d = shape.size(); d-- > 0;) {
    index[d] = flat % shape[d];
    flat /= shape[d];
  }
  return index;
}

std::string describe(const TensorInfo& tensor) {
  return fmt::format("{} {}", dtype_name(tensor.dtype), shape_to_string(tensor.shape));
}

// "; by at most 6 at [2] (3 and 9), relatively 0.714286 at [1] (2 and 7)"
std::string describe_worst(const Difference& difference) {
  if (!difference.worst_absolute || !difference.worst_relative) return "";
  const auto text = [](const WorstElement& worst) {
    return fmt::format("{:.6g} at {} ({} and {})", worst.value, shape_to_string(worst.index), worst.a, worst.b);
  };
  return fmt::format("; by at most {}, relatively {}", text(*difference.worst_absolute),
                     text(*difference.worst_relative));
}

bool same_object(const ObjectValue& a, const ObjectValue& b) {
  if (a.storages.empty() && b.storages.empty()) return pickle::equal(a.value, b.value);
  const ObjectArchive left = make_object_archive(a), right = make_object_archive(b);
  return left.data_pkl == right.data_pkl &&
         std::equal(left.storages.begin(), left.storages.end(), right.storages.begin(), right.storages.end(),
                    [](const ObjectValue::Storage& x, const ObjectValue::Storage& y) {
                      return x.entry.size_bytes == y.entry.size_bytes && x.entry.crc32 == y.entry.crc32;
                    });
}

class Differ {
 public:
  Differ(const std::shared_ptr<const Checkpoint>& a, const std::shared_ptr<const Checkpoint>& b,
         const DiffOptions& options)
      : a_(a), b_(b), options_(options), workers_(options.jobs, options.progress, options.cancellation) {}

  DiffReport run() {
    if (!options_.expand) {
      check_expansion(*a_, options_.selection);
      check_expansion(*b_, options_.selection);
    }
    workers_.progress.begin("compare", a_->tensor_bytes());
    for (std::size_t i = 0; i < a_->tensors().size(); ++i) {
      if (options_.selection.takes(a_->tensors()[i].name)) compare_tensor(i);
    }
    for (std::size_t i = 0; i < a_->objects().size(); ++i) {
      if (options_.selection.takes(a_->objects()[i].name)) compare_object(i);
    }
    for (const TensorInfo& tensor : b_->tensors()) {
      if (!has(*a_, tensor.name)) only_in(Difference::Kind::only_in_b, tensor.name, describe(tensor));
    }
    for (std::size_t i = 0; i < b_->objects().size(); ++i) {
      const std::string& name = b_->objects()[i].name;
      if (!has(*a_, name)) only_in(Difference::Kind::only_in_b, name, show_object(*b_, i));
    }
    if (a_->kind() == SourceKind::safetensors && b_->kind() == SourceKind::safetensors) compare_metadata();
    workers_.pool.wait();
    a_->compare_rest();
    b_->compare_rest();
    workers_.progress.end();
    std::sort(report_.differences.begin(), report_.differences.end(), [](const Difference& x, const Difference& y) {
      return std::tie(x.name, x.kind) < std::tie(y.name, y.kind);  // metadata may have the name of a tensor
    });
    return std::move(report_);
  }

 private:
  static bool has(const Checkpoint& checkpoint, const std::string& name) {
    return checkpoint.find_tensor(name) || checkpoint.find_object(name);
  }

  static std::string show_object(const Checkpoint& checkpoint, std::size_t i) {
    return "object " + pickle::repr(checkpoint.load_object(i).value, kShownValue);
  }

  void add(Difference difference) {
    const std::lock_guard lock(mutex_);
    report_.differences.push_back(std::move(difference));
  }

  void only_in(Difference::Kind kind, const std::string& name, const std::string& what) {
    if (!options_.selection.takes(name)) return;
    const bool in_a = kind == Difference::Kind::only_in_a;
    add({kind, name, in_a ? what : "", in_a ? "" : what, {}, 0});
  }

  void compare_tensor(std::size_t i) {
    const TensorInfo& tensor = a_->tensors()[i];
    const auto other_index = b_->find_tensor(tensor.name);
    if (!other_index) {
      if (const auto object = b_->find_object(tensor.name)) {
        add({Difference::Kind::kind, tensor.name, describe(tensor), show_object(*b_, *object), {}, 0});
      } else {
        only_in(Difference::Kind::only_in_a, tensor.name, describe(tensor));
      }
      return;
    }
    const TensorInfo& other = b_->tensors()[*other_index];
    if (tensor.shape != other.shape || !comparable(tensor.dtype, other.dtype)) {
      const auto kind = tensor.dtype != other.dtype ? Difference::Kind::dtype : Difference::Kind::shape;
      add({kind, tensor.name, describe(tensor), describe(other), {}, 0});
      return;
    }
    a_->check_partition(i);
    b_->check_partition(*other_index);
    ++report_.tensors;
    report_.bytes += tensor.size_bytes();
    const auto work = std::make_shared<TensorDiff>(a_, i, b_, *other_index);
    workers_.submit_pieces(
        tensor, kDiffPieceBytes,
        [this, work](const Box& piece, std::int64_t begin) { work->compare(piece, begin, options_.tolerance); },
        [this, work] { finish(*work); });
  }

  bool comparable(DType a, DType b) const {
    return a == b || (options_.tolerance && numbers_per_element(a) == 1 && numbers_per_element(b) == 1) ||
           (options_.tolerance && number_kind(a) == NumberKind::complex && number_kind(b) == NumberKind::complex);
  }

  void finish(const TensorDiff& work) {
    work.a.verify_checksums();
    work.b.verify_checksums();
    const ElementDifferences& found = work.found;
    if (found.count == 0) return;
    const std::vector<std::int64_t>& shape = work.a.info().shape;
    const auto worst = [&](const DifferingElement& element) -> std::optional<WorstElement> {
      if (element.position < 0) return std::nullopt;
      return WorstElement{element.difference, unflatten(element.position, shape), element.a, element.b};
    };
    Difference difference{Difference::Kind::elements,
                          work.a.info().name,
                          found.first.a,
                          found.first.b,
                          unflatten(found.first.position, shape),
                          found.count};
    difference.elements = static_cast<std::uint64_t>(volume(Box::full(shape)));
    difference.worst_absolute = worst(found.worst_absolute);
    difference.worst_relative = worst(found.worst_relative);
    add(std::move(difference));
  }

  // `format` names the library that wrote a file.
  void compare_metadata() {
    std::map<std::string, std::string> a = a_->metadata(), b = b_->metadata();
    a.erase("format");
    b.erase("format");
    const auto text = [](const std::map<std::string, std::string>& all, const std::string& key) {
      const auto found = all.find(key);
      return found == all.end() ? std::string("none") : fmt::format("'{}'", printable(found->second, kShownValue));
    };
    std::set<std::string> keys;
    for (const auto& all : {a, b}) {
      for (const auto& [key, value] : all) keys.insert(key);
    }
    for (const std::string& key : keys) {
      const auto in_a = a.find(key), in_b = b.find(key);
      if (in_a != a.end() && in_b != b.end() && in_a->second == in_b->second) continue;
      add({Difference::Kind::metadata, key, text(a, key), text(b, key), {}, 0});
    }
  }

  void compare_object(std::size_t i) {
    const std::string& name = a_->objects()[i].name;
    const auto other = b_->find_object(name);
    if (!other) {
      if (const auto tensor = b_->find_tensor(name)) {
        add({Difference::Kind::kind, name, show_object(*a_, i), describe(b_->tensors()[*tensor]), {}, 0});
      } else {
        only_in(Difference::Kind::only_in_a, name, show_object(*a_, i));
      }
      return;
    }
    ++report_.objects;
    const ObjectValue x = a_->load_object(i), y = b_->load_object(*other);
    if (same_object(x, y)) return;
    add({Difference::Kind::object,
         name,
         pickle::repr(x.value, kShownValue),
         pickle::repr(y.value, kShownValue),
         {},
         0});
  }

  std::shared_ptr<const Checkpoint> a_, b_;
  const DiffOptions& options_;
  std::mutex mutex_;
  DiffReport report_;
  Workers workers_;  // last: its threads use all of the above
};

}  // namespace

DiffReport diff(const std::shared_ptr<const Checkpoint>& a, const std::shared_ptr<const Checkpoint>& b,
                const DiffOptions& options) {
  if (options.tolerance) {
    for (const double tolerance : {options.tolerance->atol, options.tolerance->rtol}) {
      if (std::isfinite(tolerance) && tolerance >= 0) continue;
      fail(ErrorCode::invalid_argument, "diff: a tolerance is {}, expected a finite number of at least 0", tolerance);
    }
  }
  return Differ(a, b, options).run();
}

std::string to_string(const Difference& difference) {
  using Kind = Difference::Kind;
  std::string name = fmt::format("'{}'", printable(difference.name, 1000));
  switch (difference.kind) {
    case Kind::only_in_a:
      return fmt::format("{}: only in the first ({})", name, difference.a);
    case Kind::only_in_b:
      return fmt::format("{}: only in the second ({})", name, difference.b);
    case Kind::dtype:
      return fmt::format("{}: dtypes differ: {} and {}", name, difference.a, difference.b);
    case Kind::shape:
      return fmt::format("{}: shapes differ: {} and {}", name, difference.a, difference.b);
    case Kind::kind:
      return fmt::format("{}: {} and {}", name, difference.a, difference.b);
    case Kind::object:
      return fmt::format("{}: {} and {}", name, difference.a, difference.b);
    case Kind::metadata:
      return fmt::format("metadata {}: {} and {}", name, difference.a, difference.b);
    case Kind::elements:
      return fmt::format("{}: {} of {} elements differ, first at {}: {} and {}{}", name, difference.differing_elements,
                         difference.elements, shape_to_string(difference.index), difference.a, difference.b,
                         describe_worst(difference));
  }
  return name;
}

}  // namespace tessera::checkpoint
