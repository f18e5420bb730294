#include "costs/step_costs.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <malloc.h>
#include <sys/resource.h>

#include <atomic>
#include <cerrno>
#include <memory>
#include <string_view>

namespace {

std::atomic<std::int64_t> allocations = 0, allocated_bytes = 0, copied_bytes = 0;

std::unique_ptr<at::ObserverContext> count_copies(const at::RecordFunction& function) {
  if (std::string_view(function.name()) == "aten::copy_") {
    copied_bytes += static_cast<std::int64_t>(function.inputs()[0].toTensor().nbytes());
  }
  return nullptr;
}

std::int64_t page_faults() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

}  // namespace

// In place of the C library's.
extern "C" int posix_memalign(void** memory, std::size_t alignment, std::size_t size) noexcept {
  ++allocations;
  allocated_bytes += static_cast<std::int64_t>(size);
  void* const allocated = ::memalign(alignment, size);
  if (allocated == nullptr) return ENOMEM;
  *memory = allocated;
  return 0;
}

namespace tessera::bench {

StepCosts costs_of(FunctionRef<void()> step) {
  const at::CallbackHandle callback = at::addGlobalCallback(
      at::RecordFunctionCallback(count_copies).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  const std::int64_t faults = page_faults();
  allocations = allocated_bytes = copied_bytes = 0;
  step();
  const StepCosts costs{allocations, allocated_bytes, copied_bytes, page_faults() - faults};
  at::removeCallback(callback);
  return costs;
}

}  // namespace tessera::bench
