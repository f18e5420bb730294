/// \file
/// `state_values THEIRS OURS` loads the files that make_state_values.py wrote with PyTorch to the folder THEIRS, takes
/// the same next step as PyTorch, and writes the results to the folder OURS for check_state_values.py. Prints a line of
/// JSON for each file: {"row", "what", "ok", "why"}.

#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "state/optimizer_cases.h"
#include "tessera/base/file.h"
#include "tessera/state/module_state.h"
#include "tessera/state/object_archive.h"
#include "tessera/state/optimizer_state.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
namespace nn = torch::nn;

void require(const ::testing::AssertionResult& result, const std::string& what) {
  if (!result) throw std::runtime_error(what + ": " + result.message());
}

// From PyTorch's state on, the step that PyTorch made; then from the state after that one a step of which PyTorch shall
// make the like.
Value go_on(const std::string& name, const Dict& saved) {
  nn::Sequential model = testing::make_model();
  set_model_state_dict(*model, saved.at("model").get<Dict>());
  const testing::OptimizerPtr optimizer = testing::make_other(name, model);
  set_optimizer_state_dict(*model, *optimizer, saved.at("optim").get<Dict>());
  testing::step(model, *optimizer);
  require(testing::close(get_model_state_dict(*model), saved.at("after")), "the model after a step");
  // Read again, so that the step changes none of it.
  const Bytes before = save_object(
      Dict{{"model", get_model_state_dict(*model)}, {"optim", get_optimizer_state_dict(*model, *optimizer)}});
  Value state = load_object(before, name);
  testing::step(model, *optimizer);
  state.get<Dict>()["after"] = get_model_state_dict(*model);
  return state;
}

int run(const fs::path& theirs, const fs::path& ours) {
  bool all_good = true;
  for (const fs::directory_entry& entry : fs::directory_iterator(theirs)) {
    const std::string stem = entry.path().stem().string();
    std::string why;
    try {
      Value value = load_object(read_file(entry.path()), stem);
      if (stem != "objects") value = go_on(stem.substr(stem.find('-') + 1), value.get<Dict>());
      write_new_file(ours / entry.path().filename(), save_object(value));
    } catch (const std::exception& error) {
      why = error.what();
      all_good = false;
    }
    std::cout << nlohmann::json{{"row", "state"}, {"what", stem}, {"ok", why.empty()}, {"why", why}}.dump()
              << std::endl;
  }
  return all_good ? 0 : 1;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "state_values THEIRS OURS\n";
    return 2;
  }
  return tessera::run(argv[1], argv[2]);
}
