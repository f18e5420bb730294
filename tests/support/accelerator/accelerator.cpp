#include "support/accelerator/accelerator.h"

#include <c10/core/DeviceType.h>

#include <mutex>

#include "support/accelerator/device.h"
#include "support/accelerator/engine.h"

namespace tessera::sim {

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::register_privateuse1_backend("sim");
    register_guard();
    register_hooks();
    register_tensor_ops();
    register_copies();
    register_fallback();
  });
}

c10::Device device(int index) { return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)}; }

void set_order(Order order) { Engine::get().set_order(order); }
Order order() { return Engine::get().order(); }

Synchronizations synchronizations(int device) { return Engine::get().counts(device); }
void reset_synchronizations(int device) { Engine::get().reset_counts(device); }

void start_trace() { Engine::get().start_trace(); }
void note(const std::string& text) { Engine::get().note(current_stream(current_device()), text); }
std::vector<TraceEntry> take_trace() { return Engine::get().take_trace(); }

}  // namespace tessera::sim
