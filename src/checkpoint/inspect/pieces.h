#pragma once
// Work on the row-major pieces of tensors by a pool of threads.

#include <cstddef>
#include <cstdint>
#include <functional>

#include "tessera/base/cancellation.h"
#include "tessera/base/progress.h"
#include "tessera/base/thread_pool.h"
#include "tessera/checkpoint/checkpoint.h"

namespace tessera::checkpoint {

// The threads of an operation, and what it reports to.
struct Workers {
  Workers(std::size_t jobs, ProgressSink* progress_in, const Cancellation* cancellation_in);

  // Submits work(piece, begin) for each piece of a tensor of at most `limit_bytes`, where `begin` is the position of
  // the piece's first element among all elements. A task has a few pieces; the one
  // that ends last calls `finish`. A tensor without elements has
  // no pieces, and `finish` is called at once. Before each piece, checks for cancellation; after it, reports progress.
  void submit_pieces(const TensorInfo& tensor, std::int64_t limit_bytes,
                     std::function<void(const Box&, std::int64_t)> work, std::function<void()> finish);

  ProgressSink& progress;
  const Cancellation* cancellation;
  ThreadPool pool;  // last: its threads use what is above
};

}  // namespace tessera::checkpoint
