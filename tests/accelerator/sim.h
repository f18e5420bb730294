#pragma once
// What most tests of the accelerator use.

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <string>

#include "support/accelerator/accelerator.h"

namespace tessera::sim {

// A test in the order that is its parameter.
class InOrder : public ::testing::TestWithParam<Order> {
 protected:
  void SetUp() override {
    install();
    set_order(GetParam());
  }
};
inline std::string order_name(const ::testing::TestParamInfo<Order>& info) {
  return info.param == Order::late ? "late" : "early";
}

// A test in the order of the environment.
class OnDevice : public ::testing::Test {
 protected:
  void SetUp() override { install(); }
};

inline at::TensorOptions on(int index, at::ScalarType dtype = at::kFloat) {
  return at::TensorOptions().device(device(index)).dtype(dtype);
}
inline at::TensorOptions pinned(at::ScalarType dtype = at::kFloat) {
  return at::TensorOptions().dtype(dtype).pinned_memory(true);
}

inline c10::impl::VirtualGuardImpl implementation() { return c10::impl::VirtualGuardImpl(c10::kPrivateUse1); }
inline c10::Stream stream_from_pool(int index = 0) { return implementation().getStreamFromGlobalPool(device(index)); }
inline c10::Stream current(int index = 0) { return implementation().getStream(device(index)); }
// Makes `stream` wait for what is enqueued on `other`.
inline void wait_for(const c10::Stream& stream, const c10::Stream& other) {
  c10::Event event(c10::kPrivateUse1);
  event.record(other);
  event.block(stream);
}

inline bool same(const at::Tensor& on_device, const at::Tensor& on_cpu) {
  const at::Tensor copy = on_device.cpu();
  return copy.scalar_type() == on_cpu.scalar_type() && at::equal(copy, on_cpu);
}

}  // namespace tessera::sim
