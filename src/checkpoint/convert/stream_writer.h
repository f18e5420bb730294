#pragma once
// Writes files whose layout is known before any data is read. They consist of fixed bytes, data that several threads
// produce block by block, and bytes that depend on the data's CRC-32 (zip's descriptors and directories).
//
// Law: memory is bounded by threads * (kBlockBytes + memory of a producer) plus the queued units, independent of the
// size of the data.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <variant>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/cancellation.h"
#include "tessera/base/progress.h"
#include "tessera/base/thread_pool.h"
#include "tessera/checkpoint/sidecar.h"
#include "tessera/checkpoint/storage.h"

namespace tessera::checkpoint {

// Data that can be produced in parts. `produce(begin_bytes, out)` is called once per part, from any thread. Parts begin
// at multiples of `granule_bytes`.
struct Data {
  std::uint64_t length_bytes = 0;
  std::uint64_t granule_bytes = 1;
  std::function<void(std::uint64_t begin_bytes, MutableByteView out)> produce;
};

// Bytes that are computed from the CRCs of the unit's data, which are indexed by data segment.
struct Late {
  std::uint64_t length_bytes = 0;
  bool needs_all = false;  // needs the CRCs of all data segments, not only of those before it
  std::function<Bytes(const std::vector<std::uint32_t>& data_crcs)> make;
};

using Segment = std::variant<Bytes, Data, Late>;

// Consecutive segments of a file: a stored item or an entire file.
struct Unit {
  std::vector<Segment> segments;
  std::uint64_t length_bytes() const;
};

class StreamWriter {
 public:
  static constexpr std::uint64_t kBlockBytes = 4u << 20;

  // `progress` and `cancellation` must outlive it.
  StreamWriter(std::shared_ptr<Storage> storage, std::size_t threads, ProgressSink& progress,
               const Cancellation* cancellation);
  ~StreamWriter();

  // Creates a file of a known size. Then `add` appends units in order, and `end_file` ends the file.
  void begin_file(const std::string& name, std::uint64_t size_bytes);
  void add(Unit unit);
  void end_file();

  // Writes and syncs a small file immediately.
  void add_small_file(const std::string& name, ByteView bytes);

  // Waits until every file is written and synced, and returns their sizes and checksums. Rethrows the first failure.
  Sidecar finish();

 private:
  struct OpenFile;
  struct Running;
  void flush_small();
  void run_large(std::shared_ptr<Running> unit);
  void assemble(Running& unit, std::size_t first, std::size_t last, MutableByteView out);
  void task_done(const std::shared_ptr<Running>& unit);
  void unit_done(OpenFile& file);
  void file_done(OpenFile& file);
  void check_cancelled() const;

  std::shared_ptr<Storage> storage_;
  ProgressSink& progress_;
  const Cancellation* cancellation_;
  std::shared_ptr<OpenFile> current_;
  std::uint64_t next_offset_bytes_ = 0;
  std::vector<std::shared_ptr<Running>> small_;  // consecutive units of the current file, to be written together
  std::uint64_t small_bytes_ = 0;
  std::mutex result_mutex_;
  Sidecar result_;
  ThreadPool pool_;  // last: its threads use all of the above
};

}  // namespace tessera::checkpoint
