/// \file
/// Times saving and loading against the same bytes through plain system calls, in turn:
/// `save_load_bench save|load|load_other_dim|async DIRECTORY TENSORS TENSOR_BYTES REPEATS`, as each rank of a world.
/// Rank 0 prints one line of JSON: {"ours", "bare"}, medians of seconds, and for loads {"unchecked"}, those of loading
/// without looking at checksums, and {"wanted_bytes", "read_bytes"} of rank 0, the latter as the kernel counts what its
/// system calls read.
///   save            tensors cut in dimension 0, against each rank writing its bytes to a file, with fsync
///   load            the same cut, against each rank reading as much of the same files into the same memory
///   load_other_dim  cut in dimension 1, against the same
///   async           how long AsyncSaver::save stops the trainer, against copying the bytes to memory touched before

#include <ATen/ATen.h>
#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "measure_ranks.h"
#include "tessera/base/file.h"
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

// By this process, into memory: from files, and what little comes through pipes.
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
  std::vector<double> ours, bare, unchecked;
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
  fs::path bare_file() const { return directory / ("bare-" + std::to_string(group.rank())); }
  fs::path checkpoint() const { return directory / "checkpoint"; }

  void write_bare(const std::vector<at::Tensor>& all) const {
    fs::remove(bare_file());
    File file = File::create_new(bare_file());
    std::uint64_t at = 0;
    for (const at::Tensor& tensor : all) {
      file.write_at(at, {static_cast<const std::uint8_t*>(tensor.data_ptr()), tensor.nbytes()});
      at += tensor.nbytes();
    }
    file.sync();
  }
  void read_bare(const std::vector<at::Tensor>& all) const {
    const File file = File::open_read(checkpoint() / fmt::format("__{}_0.distcp", group.rank()));
    std::uint64_t at = 0;
    for (const at::Tensor& tensor : all) {
      file.read_at(at, {static_cast<std::uint8_t*>(tensor.data_ptr()), tensor.nbytes()});
      at += tensor.nbytes();
    }
  }
  // What was written or removed before doesn't disturb what is measured next.
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
    for (int i = 0; i < repeats; ++i) {
      fs::remove(bare_file());
      finish_writes();
      bare.push_back(seconds(group, [&] { write_bare(all); }));
      fs::remove(bare_file());
      remove_checkpoint();
      finish_writes();
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
    LoadOptions without_checks;
    without_checks.check_checksums = false;
    for (int i = 0; i < repeats; ++i) {
      bare.push_back(seconds(group, [&] { read_bare(all); }));
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
    AsyncSaver saver(group);
    for (int i = 0; i <= repeats; ++i) {
      remove_checkpoint();
      finish_writes();
      const double copying = seconds(group, [&] {
        for (std::size_t t = 0; t < all.size(); ++t) copies[t].copy_(all[t]);
      });
      const double stall = seconds(group, [&] { saver.save(saved, checkpoint()); });
      saver.wait();
      if (i == 0) continue;  // memory for the copies is made by the first one
      bare.push_back(copying);
      ours.push_back(stall);
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
      std::cout << "{\"ours\": " << median(ours) << ", \"bare\": " << median(bare)
                << ", \"unchecked\": " << (unchecked.empty() ? 0 : median(unchecked))
                << ", \"wanted_bytes\": " << wanted_bytes << ", \"read_bytes\": " << read_bytes << "}\n";
    }
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
