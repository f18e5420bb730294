/// \file
/// Times reading and writing `.metadata`: `metadata read|write|roundtrip FILE`. A read converts the bytes on disk to
/// columns. A write converts columns to the file FILE.out, without fsync; `write` does not count the read before it.
/// Prints one line of JSON: {"work", "chunks", "seconds", "peak_bytes"}, where the peak is that of the process.

#include <sys/resource.h>

#include <chrono>
#include <filesystem>
#include <iostream>
#include <string>

#include "tessera/base/file.h"
#include "tessera/format/dcp_metadata.h"

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::uint64_t peak_rss_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::uint64_t>(usage.ru_maxrss) * 1024;
}

int run(const std::string& work, const std::string& file) {
  if (work != "read" && work != "write" && work != "roundtrip") {
    std::cerr << "metadata: no work '" << work << "', expected read, write or roundtrip\n";
    return 2;
  }
  double seconds = 0;
  auto start = std::chrono::steady_clock::now();
  const tessera::dcp::Metadata metadata = tessera::dcp::read(tessera::File::open_read(file));
  if (work != "write") seconds += seconds_since(start);
  if (work != "read") {
    const std::string out = file + ".out";
    std::filesystem::remove(out);
    start = std::chrono::steady_clock::now();
    tessera::File written = tessera::File::create_new(out);
    written.write_at(0, tessera::dcp::write(metadata));
    written.close();
    seconds += seconds_since(start);
  }
  std::uint64_t chunks = 0;
  for (const tessera::dcp::MetadataEntry& entry : metadata.entries) chunks += entry.chunks.size();
  std::cout << "{\"work\": \"" << work << "\", \"chunks\": " << chunks << ", \"seconds\": " << seconds
            << ", \"peak_bytes\": " << peak_rss_bytes() << "}\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: metadata read|write|roundtrip FILE\n";
    return 2;
  }
  try {
    return run(argv[1], argv[2]);
  } catch (const std::exception& error) {
    std::cerr << "metadata: " << error.what() << '\n';
    return 3;
  }
}
