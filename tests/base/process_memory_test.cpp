#include "tessera/base/internal/process_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "support/temporary_directory.h"
#include "tessera/base/file.h"

namespace tessera {
namespace {

constexpr std::uint64_t kMapped = 64 << 20, kLittle = 8 << 20;

// A system that reclaims memory drops them at any instant; the peak of all resident pages still counts them.
TEST(ProcessMemoryTest, PagesOfFilesThatTheSystemReclaimsAreNoneOfThePeak) {
  const testing::TemporaryDirectory directory;
  write_new_file(directory / "pages", as_bytes(std::string(kMapped, 'x')));
  const int file = ::open((directory / "pages").c_str(), O_RDONLY | O_CLOEXEC);
  void* const pages = ::mmap(nullptr, kMapped, PROT_READ, MAP_PRIVATE | MAP_POPULATE, file, 0);
  ::close(file);
  ASSERT_NE(pages, MAP_FAILED);
  const std::uint64_t of_files = status_bytes("RssFile");
  if (of_files < kMapped) GTEST_SKIP() << "the temporary directory is in memory";

  forget_peak_memory();
  const std::uint64_t before = own_memory_bytes();
  if (::madvise(pages, kMapped, MADV_PAGEOUT) != 0 || status_bytes("RssFile") > of_files - kMapped / 2)
    GTEST_SKIP() << "the system reclaims no pages of files";
  EXPECT_LT(peak_own_memory_bytes(), before + kLittle);
  ::munmap(pages, kMapped);
}

TEST(ProcessMemoryTest, ThePeakCountsWhatWasReturned) {
  forget_peak_memory();
  const std::uint64_t before = own_memory_bytes();
  void* const pages =
      ::mmap(nullptr, kMapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  ASSERT_NE(pages, MAP_FAILED);
  ::munmap(pages, kMapped);
  EXPECT_GT(peak_own_memory_bytes(), before + kMapped - kLittle);
  EXPECT_LT(own_memory_bytes(), before + kLittle);
}

}  // namespace
}  // namespace tessera
