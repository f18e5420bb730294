#pragma once
// The side that a benchmark's figure comes from: which LibTorch and BLAS computed it, on how many threads, how fast.
// bench/pytorch/side.py describes PyTorch's side in the same fields.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <dlfcn.h>
#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <sstream>
#include <string>

namespace tessera::bench {

// The path of the first mapped file whose name contains `part`; empty if there is none.
inline std::string mapped_file(const std::string& part) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const std::size_t path = line.find('/');
    if (path != std::string::npos && line.find(part, line.rfind('/')) != std::string::npos) return line.substr(path);
  }
  return {};
}

// OpenBLAS's own description with its version and kernels, or the path of another libblas.
inline std::string blas_name() {
  if (void* openblas = ::dlopen(mapped_file("openblas").c_str(), RTLD_NOLOAD | RTLD_LAZY)) {
    if (auto* config = reinterpret_cast<char* (*)()>(::dlsym(openblas, "openblas_get_config"))) return config();
  }
  for (const char* part : {"libmkl_rt", "libmkl_core", "libblas"}) {
    if (const std::string path = mapped_file(part); !path.empty()) return path;
  }
  return "unknown";
}

// The number of threads that LibTorch uses within an operation, or OpenBLAS in a product if that is more.
inline int compute_threads() {
  int threads = at::get_num_threads();
  if (void* openblas = ::dlopen(mapped_file("openblas").c_str(), RTLD_NOLOAD | RTLD_LAZY)) {
    if (auto* count = reinterpret_cast<int (*)()>(::dlsym(openblas, "openblas_get_num_threads"))) {
      threads = std::max(threads, count());
    }
  }
  return threads;
}

// GFLOP/s of a product of two 1024 x 1024 matrices: the fastest of 10.
inline double matmul_gflops() {
  const std::int64_t side = 1024;
  const at::Tensor a = at::randn({side, side}), b = at::randn({side, side});
  at::Tensor out = at::empty({side, side});
  double fastest = 1e9;
  for (int i = 0; i < 10; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    at::mm_out(out, a, b);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    fastest = std::min(fastest, seconds.count());
  }
  return 2.0 * side * side * side / fastest / 1e9;
}

// The version of the LibTorch that is loaded, which may be a later patch than the headers name.
inline std::string libtorch_version() {
  const std::string config = at::show_config(), key = "TORCH_VERSION=";
  const std::size_t begin = config.find(key);
  if (begin == std::string::npos) return TORCH_VERSION;
  return config.substr(begin + key.size(), config.find(',', begin) - begin - key.size());
}

// One JSON object. It allocates and computes, so call it after everything else has been measured.
inline std::string describe_side() {
  std::ostringstream text;
  text << R"({"library": "C++ on LibTorch )" << libtorch_version() << R"(", "libtorch": ")" << libtorch_version()
       << R"(", "blas": ")" << blas_name() << "\", \"threads\": " << compute_threads()
       << ", \"matmul_gflops\": " << matmul_gflops() << '}';
  return text.str();
}

}  // namespace tessera::bench
