// Draws a step of FSDP with and without prefetch: step_trace FILE.svg

#include <fmt/format.h>

#include <cstdio>
#include <fstream>

#include "accelerator/step/picture.h"

namespace tessera::fsdp {
namespace {

std::string drawn_steps() {
  StepModel model;
  std::vector<Panel> panels;
  for (const bool prefetches : {true, false}) {
    model.prefetches = prefetches;
    Step step = schedule_step(model, kStepRates);
    std::string title = fmt::format("{}: step of {:.2f} ms, exposed communication {:.1f} % of it",
                                    prefetches ? "With prefetch (the default)" : "Without prefetch", step.seconds * 1e3,
                                    100 * step.exposed_share());
    panels.push_back({std::move(title), std::move(step)});
  }
  return picture_of(
      panels, model.blocks,
      {fmt::format(
           "A simulated schedule, not a measurement: rank 0 of {}, third step. The numbers are blocks: two linear "
           "layers, {} x {} and back.",
           model.ranks, model.width, 2 * model.width + 1),
       fmt::format(
           "Strategy full_shard, float32, AdamW, {} rows on each rank. Assumed: {:g} TFLOP/s, {:g} TB/s of memory, "
           "{:g} GB/s between ranks,",
           model.rows, kStepRates.flops_per_second / 1e12, kStepRates.memory_bytes_per_second / 1e12,
           kStepRates.link_bytes_per_second / 1e9),
       "no latency, streams that do not slow each other down, and a host that has enqueued the step before it "
       "begins."});
}

}  // namespace
}  // namespace tessera::fsdp

int main(int count, char** arguments) {
  if (count != 2) {
    std::fputs("usage: step_trace FILE.svg\n", stderr);
    return 2;
  }
  std::ofstream file(arguments[1], std::ios::binary);
  file << tessera::fsdp::drawn_steps();
  file.close();
  return file ? 0 : 1;
}
