/// \file
/// Reads the bytes of some files with plain system calls, over and over into the same memory: the baseline of commands
/// that only read. `read_bytes WAY FILE...` prints {"seconds"}; `read_bytes --ways` prints the number of ways, which
/// are [0, number).

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "plain_io.h"

int main(int argc, char** argv) {
  using namespace tessera;
  const std::vector<bench::Way>& ways = bench::ways_to_read();
  if (argc == 2 && std::string(argv[1]) == "--ways") return std::printf("%zu\n", ways.size()) > 0 ? 0 : 3;
  if (argc < 3) {
    std::fprintf(stderr, "usage: read_bytes WAY FILE...\n       read_bytes --ways\n");
    return 2;
  }
  try {
    const bench::Way& way = ways.at(std::stoul(argv[1]));
    // Few bytes, which stay in the cache. Nothing reads them, so that it does not matter if two threads write to the
    // same.
    std::vector<std::vector<std::uint8_t>> memory(static_cast<std::size_t>(way.threads),
                                                  std::vector<std::uint8_t>(way.call_bytes));
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 2; i < argc; ++i) {
      bench::Pieces pieces;
      for (std::uint64_t left = std::filesystem::file_size(argv[i]); left > 0; left -= pieces.back().size()) {
        std::vector<std::uint8_t>& target = memory[pieces.size() % memory.size()];
        pieces.emplace_back(target.data(), left < target.size() ? left : target.size());
      }
      bench::read_file(argv[i], pieces, way);
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    std::printf("{\"seconds\": %.6f, \"way\": \"%s\"}\n", seconds.count(), way.name.c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "read_bytes: %s\n", error.what());
    return 3;
  }
  return 0;
}
