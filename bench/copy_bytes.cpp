// The limit that conversions are measured against: the bytes of some files, one after another, read and written to one
// new file with plain system calls, then fsync. Prints seconds as JSON.
//   copy_bytes DESTINATION SOURCE...

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <vector>

namespace {

constexpr std::size_t kBlockBytes = 4u << 20;

bool copy(int from, int to, std::vector<char>& block) {
  for (;;) {
    const ssize_t got = ::read(from, block.data(), block.size());
    if (got <= 0) return got == 0;
    for (ssize_t done = 0; done < got;) {
      const ssize_t put = ::write(to, block.data() + done, static_cast<std::size_t>(got - done));
      if (put <= 0) return false;
      done += put;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: copy_bytes DESTINATION SOURCE...\n");
    return 2;
  }
  std::vector<char> block(kBlockBytes);
  const auto begin = std::chrono::steady_clock::now();
  const int to = ::open(argv[1], O_WRONLY | O_CREAT | O_EXCL, 0666);
  if (to < 0) return std::perror(argv[1]), 3;
  for (int i = 2; i < argc; ++i) {
    const int from = ::open(argv[i], O_RDONLY);
    if (from < 0 || !copy(from, to, block)) return std::perror(argv[i]), 3;
    ::close(from);
  }
  if (::fsync(to) != 0 || ::close(to) != 0) return std::perror(argv[1]), 3;
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::printf("{\"seconds\": %.6f}\n", seconds.count());
  return 0;
}
