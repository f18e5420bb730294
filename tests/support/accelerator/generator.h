#pragma once
// Generators of random numbers of the devices. A generator of "sim" holds one of the CPU and draws the same numbers. As
// on other devices a draw is a part of the call: the state that a task draws from is that at the time of its call,
// whatever runs in between.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

namespace tessera::sim {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(int index, std::uint64_t seed = c10::default_rng_seed_val);

  void set_current_seed(std::uint64_t seed) override;
  std::uint64_t current_seed() const override;
  std::uint64_t seed() override;
  void set_offset(std::uint64_t offset) override;
  std::uint64_t get_offset() const override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  // Returns a generator of the CPU in the state of this one.
  at::Generator on_cpu() const;
  // Takes the state of a generator of the CPU.
  void advance_to(const at::Generator& cpu);

 private:
  DeviceGenerator* clone_impl() const override;
  at::Generator cpu_;
};

// The default generator of a device; -1 is the current one.
const at::Generator& default_generator(int index);

}  // namespace tessera::sim
