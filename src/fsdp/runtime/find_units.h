#pragma once
// Which parameters of a model belong to which unit.

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "tessera/fsdp/flat_param_handle.h"
#include "tessera/fsdp/fully_sharded_data_parallel.h"

namespace tessera::fsdp {

struct FoundUnit {
  std::string name;                         // of its module in the model
  Wrappable* wrappable = nullptr;           // null for a model that isn't wrapped
  std::vector<NamedParameter> params;       // by their names in the model
  std::vector<torch::nn::Module*> modules;  // whose own parameters they are
};

// The model itself first, also if it has no parameters, then the units within it in the order of the module's children,
// each behind those within it. Throws Error(invalid_argument) for a parameter that would be in two units, and a module
// that is a unit already.
std::vector<FoundUnit> find_units(torch::nn::Module& model, const Options& options);

}  // namespace tessera::fsdp
