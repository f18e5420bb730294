#include "tessera/checkpoint/load_plan.h"

#include <algorithm>
#include <utility>

#include "checkpoint/load/block_scales.h"
#include "tessera/base/cast.h"
#include "tessera/base/error.h"
#include "tessera/layout/redistribution.h"

namespace tessera::checkpoint {
namespace {

class Planner {
 public:
  Planner(const Targets& targets, const Checkpoint& checkpoint, const LoadRules& rules)
      : targets_(targets), checkpoint_(checkpoint), rules_(rules) {}

  LoadPlan plan() {
    plan_.items.reserve(targets_.size());
    for (std::uint32_t t = 0; t < targets_.size(); ++t) {
      const TargetEntry& target = targets_[t];
      if (const auto* tensor = std::get_if<TargetTensor>(&target.value)) {
        take_tensor(t, *tensor);
      } else if (const auto object = checkpoint_.find_object(target.name)) {
        plan_.objects.push_back({t, *object});
      } else if (checkpoint_.find_tensor(target.name)) {
        mismatch(fmt::format("'{}' is a tensor, expected an object", printable(target.name)));
      } else {
        plan_.missing.push_back(target.name);
      }
    }
    report();
    return std::move(plan_);
  }

 private:
  void mismatch(const std::string& text) {
    if (++mismatches_ <= kListed) listed_ += (listed_.empty() ? "" : "; ") + text;
  }

  // Names are mostly in the order of the checkpoint.
  std::optional<std::size_t> find_tensor(std::string_view name) {
    const std::vector<TensorInfo>& tensors = checkpoint_.tensors();
    const bool is_next = next_tensor_ < tensors.size() && tensors[next_tensor_].name == name;
    const std::optional<std::size_t> found = is_next ? next_tensor_ : checkpoint_.find_tensor(name);
    if (found) next_tensor_ = *found + 1;
    return found;
  }

  void take_tensor(std::uint32_t t, const TargetTensor& target) {
    const std::string& name = targets_[t].name;
    const auto found = find_tensor(name);
    if (!found) {
      if (checkpoint_.find_object(name)) {
        mismatch(fmt::format("'{}' is an object, expected a tensor", printable(name)));
      } else {
        plan_.missing.push_back(name);
      }
      return;
    }
    const TensorInfo& stored = checkpoint_.tensors()[*found];
    if (stored.shape != target.shape) {
      return mismatch(fmt::format("tensor '{}' has shape {}, expected {}", printable(name),
                                  shape_to_string(stored.shape), shape_to_string(target.shape)));
    }
    const std::optional<std::size_t> scales =
        rules_.dequantize_block_size ? find_scales(checkpoint_, stored) : std::nullopt;
    if (scales) {
      if (!check_scales(stored, checkpoint_.tensors()[*scales], target.dtype)) return;
      checkpoint_.check_partition(*scales);
    } else if (!target.chunks.empty() && stored.dtype != target.dtype &&
               !(rules_.allow_cast && can_cast(stored.dtype, target.dtype))) {
      return mismatch(fmt::format("tensor '{}' has dtype {}, expected {}", printable(name), dtype_name(stored.dtype),
                                  dtype_name(target.dtype)));
    }
    BoxList wanted(target.shape.size());
    wanted.reserve(target.chunks.size());
    for (const TargetChunk& chunk : target.chunks) {
      if (!is_empty(chunk.box) && !is_valid(chunk.box, target.shape)) {
        return mismatch(fmt::format("the target of tensor '{}' has chunk {}, expected a box within shape {}",
                                    printable(name), to_string(chunk.box), shape_to_string(target.shape)));
      }
      wanted.push_back(chunk.box);
    }
    // TensorReader only counts elements, so an overlap could hide a hole.
    if (!wanted.empty()) checkpoint_.check_partition(*found);
    for (Transfer& transfer : plan_transfers(stored.chunks, wanted)) {
      plan_.items.push_back({t, static_cast<std::uint32_t>(transfer.destination), static_cast<std::uint32_t>(*found),
                             static_cast<std::uint32_t>(transfer.source), std::move(transfer.box)});
    }
  }

  // Returns whether the scales fit to the tensor and the target.
  bool check_scales(const TensorInfo& stored, const TensorInfo& scales, DType wanted) {
    const std::int64_t block_size = *rules_.dequantize_block_size;
    const std::string name = printable(stored.name);
    const auto is_floating = [](DType dtype) { return can_cast(dtype, DType::float32); };
    if (block_size < 1) {
      mismatch(fmt::format("dequantize_block_size is {}, expected at least 1", block_size));
    } else if (stored.shape.size() != 2 || scales.shape != block_counts(stored.shape, block_size)) {
      mismatch(
          fmt::format("tensor '{}' has shape {} and scales of shape {}, expected two dimensions and a scale for each "
                      "block of {}x{}",
                      name, shape_to_string(stored.shape), shape_to_string(scales.shape), block_size, block_size));
    } else if (!is_floating(stored.dtype) || !is_floating(scales.dtype) || !is_floating(wanted)) {
      mismatch(fmt::format("tensor '{}' has dtype {} and scales of {}, expected floating-point ones for a target of {}",
                           name, dtype_name(stored.dtype), dtype_name(scales.dtype), dtype_name(wanted)));
    } else {
      return true;
    }
    return false;
  }

  void report() {
    if (!rules_.allow_partial && !plan_.missing.empty()) {
      std::string names;
      for (std::size_t i = 0; i < std::min(kListed, plan_.missing.size()); ++i) {
        names += fmt::format("{}'{}'", i == 0 ? "" : ", ", printable(plan_.missing[i]));
      }
      if (plan_.missing.size() > kListed) names += fmt::format(" and {} more", plan_.missing.size() - kListed);
      fail(ErrorCode::not_found, "load {}: the checkpoint has no {}, expected every name of the state{}{}",
           checkpoint_.path().string(), names, listed_.empty() ? "" : "; ", listed_);
    }
    if (mismatches_ == 0) return;
    if (mismatches_ > kListed) listed_ += fmt::format("; and {} more", mismatches_ - kListed);
    if (mismatches_ > 1) listed_ = fmt::format("{} names do not match: {}", mismatches_, listed_);
    fail(ErrorCode::invalid_argument, "load {}: {}", checkpoint_.path().string(), listed_);
  }

  static constexpr std::size_t kListed = 20;
  const Targets& targets_;
  const Checkpoint& checkpoint_;
  const LoadRules& rules_;
  LoadPlan plan_;
  std::size_t next_tensor_ = 0;  // after the one that was found last
  std::size_t mismatches_ = 0;
  std::string listed_;  // the first kListed mismatches
};

}  // namespace

LoadPlan make_load_plan(const Targets& targets, const Checkpoint& checkpoint, const LoadRules& rules) {
  return Planner(targets, checkpoint, rules).plan();
}

}  // namespace tessera::checkpoint
