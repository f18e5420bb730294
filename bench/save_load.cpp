/// \file
/// Times saving and loading, and in turn with them the same bytes through plain system calls:
/// `save_load_bench save|load|load_other_dim|async DIRECTORY TENSORS TENSOR_BYTES REPEATS`, as each rank of a world.
/// Rank 0 prints one line of JSON: {"ours"}: the median in seconds; {"bare"}: the median of the fastest plain way;
/// {"bare_way"}: its name; {"ways"}: the median of each way; {"side"}, see side.h. For loads also {"unchecked"}:
/// loading without checking checksums, and {"wanted_bytes", "read_bytes"} of rank 0; the kernel counts the latter.
///   save            tensors sharded in dimension 0; plain: each rank writes its bytes to one file, with fsync
///   load            the same sharding; plain: each rank reads as many bytes of the same files into the same memory
///   load_other_dim  sharded in dimension 1; plain: as for load
///   async           how long AsyncSaver::save blocks the trainer; plain: copies the bytes to memory that is mapped

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "measure_ranks.h"
#include "plain/plain_io.h"
#include "side.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/init.h"
#include "tessera/state/async_save.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"

namespace {

using namespace tessera;
using bench::chunks;
using bench::median;
using bench::seconds;
namespace fs = std::filesystem;

// Read by this process into memory: from files, and a few from pipes.
std::uint64_t bytes_read_by_system_calls() {
  std::ifstream io("/proc/self/io");
  std::string name;
  std::uint64_t bytes = 0;
  io >> name >> bytes;
  return bytes;
}

struct Bench {
  ProcessGroup group = init_process_group();
  fs::path directory;
  std::int64_t tensors = 0, tensor_bytes = 0;
  int repeats = 0;
  std::vector<double> ours, unchecked;
  bench::TimesByWay bare;
  std::uint64_t wanted_bytes = 0, read_bytes = 0;

  StateDict state(std::int64_t dim) const {
    Dict model;
    const std::int64_t rows = 64, columns = tensor_bytes / 4 / rows;
    for (std::int64_t i = 0; i < tensors; ++i) {
      model.insert_or_assign("layer." + std::to_string(i) + ".weight",
                             ShardedTensor::full(chunks(dim, group.size()), {rows, columns}, i, group));
    }
    return {{"model", std::move(model)}, {"step", 1}};
  }
  static std::vector<at::Tensor> locals(const StateDict& state) {
    std::vector<at::Tensor> all;
    for (const auto& [name, value] : state.at("model").get<Dict>()) {
      all.push_back(value.get<ShardedTensor>().local_tensor());
    }
    return all;
  }
  static bench::Pieces bytes_of(const std::vector<at::Tensor>& tensors) {
    bench::Pieces pieces;
    for (const at::Tensor& tensor : tensors) {
      pieces.emplace_back(static_cast<std::uint8_t*>(tensor.data_ptr()), tensor.nbytes());
    }
    return pieces;
  }
  std::string bare_file() const { return directory / fmt::format("bare-{}", group.rank()); }
  fs::path checkpoint() const { return directory / "checkpoint"; }

  // Each of `ways` in turn; `prepare` is not timed.
  template <typename Work>
  void time_bare(const std::vector<bench::Way>& ways, FunctionRef<void()> prepare, Work work) {
    for (const bench::Way& way : ways) {
      prepare();
      bare[way.name].push_back(seconds(group, [&] { work(way); }));
    }
  }
  // So that earlier writes and removals do not disturb the next measurement.
  void finish_writes() const {
    if (group.rank() == 0) ::sync();
    group.barrier();
  }
  void remove_checkpoint() const {
    if (group.rank() == 0) fs::remove_all(checkpoint());
    group.barrier();
  }

  void save_rows() {
    const StateDict saved = state(0);
    const std::vector<at::Tensor> all = locals(saved);
    const bench::Pieces pieces = bytes_of(all);
    const auto clear = [&] {
      fs::remove(bare_file());
      remove_checkpoint();
      finish_writes();
    };
    for (int i = 0; i < repeats; ++i) {
      time_bare(bench::ways_to_write(), clear,
                [&](const bench::Way& way) { bench::write_file(bare_file(), pieces, way); });
      clear();
      ours.push_back(seconds(group, [&] { save(saved, checkpoint(), group); }));
    }
  }
  void load_rows(std::int64_t dim) {
    {
      const StateDict saved = state(0);
      remove_checkpoint();
      save(saved, checkpoint(), group);
    }
    finish_writes();
    StateDict wanted = state(dim);
    const std::vector<at::Tensor> all = locals(wanted);
    const bench::Pieces pieces = bytes_of(all);
    const std::string file = checkpoint() / fmt::format("__{}_0.distcp", group.rank());
    LoadOptions without_checks;
    without_checks.check_checksums = false;
    for (int i = 0; i < repeats; ++i) {
      time_bare(
          bench::ways_to_read(), [] {}, [&](const bench::Way& way) { bench::read_file(file, pieces, way); });
      unchecked.push_back(seconds(group, [&] { load(wanted, checkpoint(), group, without_checks); }));
      const std::uint64_t read_before = bytes_read_by_system_calls();
      ours.push_back(seconds(group, [&] { wanted_bytes = load(wanted, checkpoint(), group).wanted_bytes; }));
      read_bytes = bytes_read_by_system_calls() - read_before;
    }
  }
  void async_rows() {
    const StateDict saved = state(0);
    const std::vector<at::Tensor> all = locals(saved);
    std::vector<at::Tensor> copies;
    for (const at::Tensor& tensor : all) copies.push_back(at::ones_like(tensor));
    const bench::Pieces from = bytes_of(all), to = bytes_of(copies);
    const auto clear = [&] {
      remove_checkpoint();
      finish_writes();
    };
    AsyncSaver saver(group);
    for (int i = 0; i <= repeats; ++i) {
      time_bare(bench::ways_to_copy_memory(), clear, [&](const bench::Way& way) { bench::copy_memory(to, from, way); });
      const double stall = seconds(group, [&] { saver.save(saved, checkpoint()); });
      saver.wait();
      if (i > 0) ours.push_back(stall);  // the first allocates the memory for the copies
    }
  }

  int run(const std::string& work) {
    if (group.rank() == 0) fs::create_directories(directory);
    group.barrier();
    if (work == "save") save_rows();
    if (work == "load") load_rows(0);
    if (work == "load_other_dim") load_rows(1);
    if (work == "async") async_rows();
    fs::remove(bare_file());
    remove_checkpoint();
    if (group.rank() == 0) {
      const auto [way, seconds_of_way] = bench::fastest(bare);
      std::string ways;
      for (const auto& [name, times] : bare) {
        ways += fmt::format("{}\"{}\": {:.6f}", ways.empty() ? "" : ", ", name, median(times));
      }
      std::cout << fmt::format(
          R"({{"ours": {:.6f}, "bare": {:.6f}, "bare_way": "{}", "ways": {{{}}}, "unchecked": {:.6f}, )"
          R"("wanted_bytes": {}, "read_bytes": {}, "side": {}}})"
          "\n",
          median(ours), seconds_of_way, way, ways, unchecked.empty() ? 0 : median(unchecked), wanted_bytes, read_bytes,
          bench::describe_side());
    }
    group.barrier();
    return 0;
  }
};

}  // namespace

int main(int argc, char** argv) {
  const std::string work = argc == 6 ? argv[1] : "";
  if (work != "save" && work != "load" && work != "load_other_dim" && work != "async") {
    std::cerr << "usage: save_load_bench save|load|load_other_dim|async DIRECTORY TENSORS TENSOR_BYTES REPEATS\n";
    return 2;
  }
  try {
    Bench bench;
    at::set_num_threads(std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / bench.group.size()));
    bench.directory = argv[2];
    bench.tensors = std::stoll(argv[3]);
    bench.tensor_bytes = std::stoll(argv[4]);
    bench.repeats = std::stoi(argv[5]);
    return bench.run(work);
  } catch (const std::exception& error) {
    std::cerr << "save_load_bench: " << error.what() << '\n';
    return 3;
  }
}
