#include "checkpoint/inspect/pieces.h"

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/layout/byte_ranges.h"

namespace tessera::checkpoint {
namespace {

// To pass a piece to a thread takes as long as to read a part of it.
constexpr std::size_t kPiecesOfTask = 8;

}  // namespace

Workers::Workers(std::size_t jobs, ProgressSink* progress_in, const Cancellation* cancellation_in)
    : progress(progress_in != nullptr ? *progress_in : no_progress()),
      cancellation(cancellation_in),
      pool(threads_for(jobs)) {}

void Workers::submit_pieces(const TensorInfo& tensor, std::int64_t limit_bytes,
                            std::function<void(const Box&, std::int64_t)> work, std::function<void()> finish) {
  struct Shared {
    std::function<void(const Box&, std::int64_t)> work;
    std::function<void()> finish;
    std::atomic<std::size_t> left = 1;  // includes one until all are submitted
    void done() {
      if (left.fetch_sub(1) == 1) finish();
    }
  };
  const auto shared = std::make_shared<Shared>();
  shared->work = std::move(work);
  shared->finish = std::move(finish);
  const std::int64_t element_bytes = dtype_size(tensor.dtype);
  std::int64_t begin = 0;
  std::vector<std::pair<Box, std::int64_t>> pieces;  // of the next task, with the position of the first element
  const auto submit = [&] {
    shared->left.fetch_add(1);
    pool.submit([this, shared, pieces = std::move(pieces), element_bytes] {
      for (const auto& [piece, position] : pieces) {
        if (cancellation != nullptr) cancellation->check();
        shared->work(piece, position);
        progress.advance(static_cast<std::uint64_t>(volume(piece) * element_bytes));
      }
      shared->done();
    });
    pieces = {};
  };
  for_each_row_major_piece(Box::full(tensor.shape), element_bytes, limit_bytes, [&](const Box& piece) {
    pieces.emplace_back(piece, begin);
    begin += volume(piece);
    if (pieces.size() == kPiecesOfTask) submit();
  });
  if (!pieces.empty()) submit();
  shared->done();
}

}  // namespace tessera::checkpoint
