/// \file
/// Copies the bytes of some files, one after another, into a new file with plain system calls and fsyncs it: the
/// baseline of conversions. `copy_bytes WAY DESTINATION SOURCE...` prints {"seconds"}; `copy_bytes --ways` prints the
/// number of ways, which are [0, number).

#include <chrono>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "plain_io.h"

int main(int argc, char** argv) {
  using namespace tessera;
  const std::vector<bench::Way>& ways = bench::ways_to_copy_files();
  if (argc == 2 && std::string(argv[1]) == "--ways") return std::printf("%zu\n", ways.size()) > 0 ? 0 : 3;
  if (argc < 4) {
    std::fprintf(stderr, "usage: copy_bytes WAY DESTINATION SOURCE...\n       copy_bytes --ways\n");
    return 2;
  }
  try {
    const bench::Way& way = ways.at(std::stoul(argv[1]));
    const auto begin = std::chrono::steady_clock::now();
    bench::copy_files(argv[2], {argv + 3, argv + argc}, way);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    std::printf("{\"seconds\": %.6f, \"way\": \"%s\"}\n", seconds.count(), way.name.c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "copy_bytes: %s\n", error.what());
    return 3;
  }
  return 0;
}
