#include "tessera/checkpoint/diff.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "checkpoint/buffer.h"
#include "checkpoint/convert/output_plan.h"
#include "checkpoint/source/expansion.h"
#include "tessera/base/cast.h"
#include "tessera/base/error.h"
#include "tessera/base/thread_pool.h"
#include "tessera/checkpoint/tensor_reader.h"
#include "tessera/format/python_value.h"
#include "tessera/layout/byte_ranges.h"

namespace tessera::checkpoint {
namespace {

constexpr std::int64_t kCompareBytes = 4 << 20;
constexpr std::size_t kShownValue = 200;

// Compares one tensor block by block. The last block to finish verifies the checksums and reports.
struct TensorDiff {
  TensorDiff(const std::shared_ptr<const Checkpoint>& checkpoint_a, std::size_t index_a,
             const std::shared_ptr<const Checkpoint>& checkpoint_b, std::size_t index_b)
      : a(checkpoint_a, index_a), b(checkpoint_b, index_b) {}
  TensorReader a, b;
  std::atomic<std::size_t> blocks_left = 1;  // includes one until all are submitted
  std::mutex mutex;
  std::uint64_t differing = 0;
  std::optional<std::int64_t> first;  // flat index
  std::string value_a, value_b;       // at `first`

  void compare(const Box& block, std::int64_t flat_begin) {
    const DType dtype = a.info().dtype;
    const auto size = static_cast<std::size_t>(dtype_size(dtype));
    const std::size_t bytes = static_cast<std::size_t>(volume(block)) * size;
    thread_local Buffer buffer_a, buffer_b;
    const MutableByteView bytes_a = buffer_a.get(bytes), bytes_b = buffer_b.get(bytes);
    a.read(block, bytes_a);
    b.read(block, bytes_b);
    if (bytes == 0 || std::memcmp(bytes_a.data(), bytes_b.data(), bytes) == 0) return;
    std::uint64_t count = 0;
    std::size_t first_here = 0;
    for (std::size_t at = 0; at < bytes; at += size) {
      if (std::memcmp(bytes_a.data() + at, bytes_b.data() + at, size) == 0) continue;
      if (count++ == 0) first_here = at;
    }
    const std::int64_t index = flat_begin + static_cast<std::int64_t>(first_here / size);
    const std::lock_guard lock(mutex);
    differing += count;
    if (first && *first < index) return;
    first = index;
    value_a = element_to_string(dtype, bytes_a.data() + first_here);
    value_b = element_to_string(dtype, bytes_b.data() + first_here);
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
      : a_(a),
        b_(b),
        options_(options),
        progress_(options.progress != nullptr ? *options.progress : no_progress()),
        pool_(options.jobs != 0 ? options.jobs : std::clamp<std::size_t>(available_processors(), 4, 16)) {}

  DiffReport run() {
    if (!options_.expand) {
      check_expansion(*a_, options_.selection);
      check_expansion(*b_, options_.selection);
    }
    progress_.begin("compare", a_->tensor_bytes());
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
    pool_.wait();
    a_->compare_rest();
    b_->compare_rest();
    progress_.end();
    std::sort(report_.differences.begin(), report_.differences.end(),
              [](const Difference& x, const Difference& y) { return x.name < y.name; });
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
    if (tensor.dtype != other.dtype || tensor.shape != other.shape) {
      const auto kind = tensor.dtype != other.dtype ? Difference::Kind::dtype : Difference::Kind::shape;
      add({kind, tensor.name, describe(tensor), describe(other), {}, 0});
      return;
    }
    a_->check_partition(i);
    b_->check_partition(*other_index);
    ++report_.tensors;
    report_.bytes += tensor.size_bytes();
    const auto work = std::make_shared<TensorDiff>(a_, i, b_, *other_index);
    std::int64_t begin = 0;
    const Box full = Box::full(tensor.shape);
    for_each_row_major_piece(full, dtype_size(tensor.dtype), kCompareBytes, [&](const Box& block) {
      work->blocks_left.fetch_add(1);
      pool_.submit([this, work, block, begin] {
        if (options_.cancellation != nullptr) options_.cancellation->check();
        work->compare(block, begin);
        progress_.advance(static_cast<std::uint64_t>(volume(block) * dtype_size(work->a.info().dtype)));
        if (work->blocks_left.fetch_sub(1) == 1) finish(*work);
      });
      begin += volume(block);
    });
    if (work->blocks_left.fetch_sub(1) == 1) finish(*work);
  }

  void finish(const TensorDiff& work) {
    work.a.verify_checksums();
    work.b.verify_checksums();
    if (!work.first) return;
    add({Difference::Kind::elements, work.a.info().name, work.value_a, work.value_b,
         unflatten(*work.first, work.a.info().shape), work.differing});
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
  ProgressSink& progress_;
  std::mutex mutex_;
  DiffReport report_;
  ThreadPool pool_;  // last: its threads use all of the above
};

template <typename T>
T element_as(const std::uint8_t* element) {
  T value;
  std::memcpy(&value, element, sizeof value);
  return value;
}

std::string real_to_string(DType dtype, const std::uint8_t* element) {
  double value = 0;
  cast(dtype, element, DType::float64, reinterpret_cast<std::uint8_t*>(&value), 1);
  if (dtype == DType::float32) return fmt::format("{}", static_cast<float>(value));
  return fmt::format("{}", value);
}

std::string complex_to_string(DType real, const std::uint8_t* element) {
  const std::string imaginary = real_to_string(real, element + dtype_size(real));
  return fmt::format("({}{}{}j)", real_to_string(real, element), imaginary.starts_with('-') ? "" : "+", imaginary);
}

}  // namespace

DiffReport diff(const std::shared_ptr<const Checkpoint>& a, const std::shared_ptr<const Checkpoint>& b,
                const DiffOptions& options) {
  return Differ(a, b, options).run();
}

std::string element_to_string(DType dtype, const std::uint8_t* element) {
  switch (dtype) {
    case DType::bool_:
      return element[0] != 0 ? "True" : "False";
    case DType::uint8:
      return fmt::format("{}", element_as<std::uint8_t>(element));
    case DType::int8:
      return fmt::format("{}", element_as<std::int8_t>(element));
    case DType::int16:
      return fmt::format("{}", element_as<std::int16_t>(element));
    case DType::int32:
      return fmt::format("{}", element_as<std::int32_t>(element));
    case DType::int64:
      return fmt::format("{}", element_as<std::int64_t>(element));
    case DType::uint16:
      return fmt::format("{}", element_as<std::uint16_t>(element));
    case DType::uint32:
      return fmt::format("{}", element_as<std::uint32_t>(element));
    case DType::uint64:
      return fmt::format("{}", element_as<std::uint64_t>(element));
    case DType::complex32:
      return complex_to_string(DType::float16, element);
    case DType::complex64:
      return complex_to_string(DType::float32, element);
    case DType::complex128:
      return complex_to_string(DType::float64, element);
    case DType::bcomplex32:
      return complex_to_string(DType::bfloat16, element);
    default:
      break;
  }
  if (is_floating_point(dtype) && can_cast(dtype, DType::float64)) return real_to_string(dtype, element);
  std::string text = "0x";
  for (std::int64_t i = dtype_size(dtype); i-- > 0;) text += fmt::format("{:02x}", element[i]);
  return text;
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
      return fmt::format("{}: {} elements differ, first at {}: {} and {}", name, difference.differing_elements,
                         shape_to_string(difference.index), difference.a, difference.b);
  }
  return name;
}

}  // namespace tessera::checkpoint
