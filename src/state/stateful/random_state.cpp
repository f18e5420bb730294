#include "tessera/state/stateful.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

namespace {

class RandomStateful final : public Stateful {
 public:
  RandomStateful(std::string rank, std::vector<std::pair<std::string, at::Generator>> generators)
      : rank_(std::move(rank)), generators_(std::move(generators)) {}

  StateDict state_dict() override {
    Dict states;
    for (auto& [name, generator] : generators_) {
      const std::lock_guard lock(generator.mutex());
      states[name] = generator.get_state();
    }
    return {{rank_, std::move(states)}};
  }

  void load_state_dict(const StateDict& state_dict) override {
    const Dict& states = state_dict.at(rank_).get<Dict>();
    for (auto& [name, generator] : generators_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(states.at(name).get<at::Tensor>());
    }
  }

 private:
  std::string rank_;
  std::vector<std::pair<std::string, at::Generator>> generators_;
};

}  // namespace

std::shared_ptr<Stateful> stateful_random(const ProcessGroup& group, const std::vector<at::Device>& devices) {
  std::vector<std::pair<std::string, at::Generator>> generators{{"cpu", at::detail::getDefaultCPUGenerator()}};
  std::map<std::string, int> count;
  for (const at::Device& device : devices) {
    const at::Generator generator =
        device.is_cpu() ? at::detail::getDefaultCPUGenerator() : at::globalContext().defaultGenerator(device);
    for (const auto& [name, known] : generators) {
      if (known != generator) continue;
      fail(ErrorCode::invalid_argument,
           "stateful_random: the generator of {} is '{}' already, expected each device once", device.str(), name);
    }
    const std::string type = to_device(device).type;
    generators.emplace_back(fmt::format("{}{}", type, count[type]++), generator);
  }
  return std::make_shared<RandomStateful>(fmt::format("rank{}", group.rank()), std::move(generators));
}

}  // namespace tessera
