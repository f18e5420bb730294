// Functions of batch and instance norms that LibTorch declares, but does not export. Without them no class can derive
// from these modules.

#include <torch/nn/functional/instancenorm.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/instancenorm.h>

#include <ostream>

namespace torch::nn {

namespace {

template <typename Options>
void print(std::ostream& stream, const char* kind, int dimensions, const Options& options) {
  stream << "torch::nn::" << kind << dimensions << "d(" << options.num_features() << ", eps=" << options.eps();
  stream << ", momentum=";
  if constexpr (requires { options.momentum().has_value(); }) {
    if (options.momentum().has_value()) {
      stream << *options.momentum();
    } else {
      stream << "None";
    }
  } else {
    stream << options.momentum();
  }
  stream << ", affine=" << (options.affine() ? "true" : "false")
         << ", track_running_stats=" << (options.track_running_stats() ? "true" : "false") << ")";
}

}  // namespace

template <>
void BatchNormImplBase<1, BatchNorm1dImpl>::pretty_print(std::ostream& stream) const {
  print(stream, "BatchNorm", 1, options);
}
template <>
void BatchNormImplBase<2, BatchNorm2dImpl>::pretty_print(std::ostream& stream) const {
  print(stream, "BatchNorm", 2, options);
}
template <>
void BatchNormImplBase<3, BatchNorm3dImpl>::pretty_print(std::ostream& stream) const {
  print(stream, "BatchNorm", 3, options);
}
template <>
void InstanceNormImpl<1, InstanceNorm1dImpl>::pretty_print(std::ostream& stream) const {
  print(stream, "InstanceNorm", 1, options);
}
template <>
void InstanceNormImpl<2, InstanceNorm2dImpl>::pretty_print(std::ostream& stream) const {
  print(stream, "InstanceNorm", 2, options);
}
template <>
void InstanceNormImpl<3, InstanceNorm3dImpl>::pretty_print(std::ostream& stream) const {
  print(stream, "InstanceNorm", 3, options);
}

}  // namespace torch::nn
