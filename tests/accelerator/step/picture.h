#pragma once
// A picture of steps: a lane for each stream, a bar for all that runs on it, as SVG that is legible on light and dark
// pages.

#include <string>
#include <vector>

#include "accelerator/step/step.h"

namespace tessera::fsdp {

struct Panel {
  std::string title;
  Step step;
};

// Returns an SVG image of the panels, one below the other, on one axis of time. Unit `own_unit` is the model's own.
// `caption` are the lines below. The times that `Step::exposed` has are marked.
std::string picture_of(const std::vector<Panel>& panels, int own_unit, const std::vector<std::string>& caption);

}  // namespace tessera::fsdp
