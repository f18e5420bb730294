// `tessera show`: values in brackets.

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands/show.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/checkpoint/diff.h"

namespace tessera::cli {
namespace {

using checkpoint::TensorReader;
using checkpoint::TensorSlice;

constexpr std::int64_t kSummarizedFrom = 1000;  // as NumPy's `threshold`
constexpr std::int64_t kEdge = 3;               // as NumPy's `edgeitems`
constexpr std::int64_t kMostSummarized = 1'000'000;
constexpr std::int64_t kReadBytes = 1 << 20;
constexpr std::size_t kColumns = 80;  // if standard output is not a terminal

// A kept dimension of a slice.
struct Shown {
  std::int64_t size = 0;       // indices that are printed
  bool is_summarized = false;  // whether "..." follows the first kEdge of them
};

std::vector<Shown> shown_dims(const TensorSlice& slice, bool all) {
  const bool summarizes = !all && slice.elements() > kSummarizedFrom;
  std::vector<Shown> shown;
  std::int64_t count = 1;
  for (const std::int64_t size : slice.shape()) {
    const bool is_summarized = summarizes && size > 2 * kEdge;
    shown.push_back({is_summarized ? 2 * kEdge : size, is_summarized});
    count = std::min(count * shown.back().size, kMostSummarized + 1);
  }
  if (summarizes && count > kMostSummarized) {
    fail(ErrorCode::unsupported,
         "show: the summary of {0} has over {1} elements, expected at most {1}; select a part, as in NAME[0, :], or "
         "print everything with --all",
         shape_to_string(slice.shape()), kMostSummarized);
  }
  return shown;
}

// Calls `visit` with the text of each element that is printed, in row-major order.
class Elements {
 public:
  Elements(Session& session, const TensorReader& reader, TensorSlice slice, DType dtype,
           const std::vector<Shown>& shown)
      : session_(session), reader_(reader), slice_(std::move(slice)), dtype_(dtype) {
    std::size_t kept = 0;
    for (const TensorSlice::Dim& dim : slice_.dims) {
      is_summarized_.push_back(dim.is_kept && shown[kept].is_summarized);
      kept += dim.is_kept ? 1 : 0;
    }
  }

  void for_each(FunctionRef<void(const std::string&)> visit) { read_from(0, visit); }

 private:
  // Reads what is selected of dimension d and those after it; the ones before it have one index.
  void read_from(std::size_t d, FunctionRef<void(const std::string&)> visit) {
    const bool is_summarized = std::find(is_summarized_.begin() + static_cast<std::ptrdiff_t>(d), is_summarized_.end(),
                                         true) != is_summarized_.end();
    if (!is_summarized) return read(visit);
    const TensorSlice::Dim all = slice_.dims[d];
    const auto narrow = [&](std::int64_t first, std::int64_t count) {
      slice_.dims[d] = {all.begin + first * all.step, count, all.step, all.is_kept};
      read_from(d + 1, visit);
    };
    const bool is_last = std::find(is_summarized_.begin() + static_cast<std::ptrdiff_t>(d) + 1, is_summarized_.end(),
                                   true) == is_summarized_.end();
    if (is_last) {  // nothing after it is left out, so that adjacent indices are read together
      narrow(0, kEdge);
      narrow(all.size - kEdge, kEdge);
    } else {
      for (std::int64_t i = 0; i < all.size; ++i) {
        if (is_summarized_[d] && i == kEdge) i = all.size - kEdge;
        narrow(i, 1);
      }
    }
    slice_.dims[d] = all;
  }

  void read(FunctionRef<void(const std::string&)> visit) {
    const auto size = static_cast<std::size_t>(dtype_size(dtype_));
    checkpoint::read_slice(reader_, slice_, dtype_, kReadBytes, [&](ByteView elements) {
      session_.cancellation.check();
      for (std::size_t at = 0; at < elements.size(); at += size) {
        visit(checkpoint::element_to_string(dtype_, elements.data() + at));
      }
    });
  }

  Session& session_;
  const TensorReader& reader_;
  TensorSlice slice_;
  DType dtype_;
  std::vector<bool> is_summarized_;  // by dimension of the tensor
};

// Writes elements, each in a cell of `width`, with brackets and line breaks.
class Brackets {
 public:
  Brackets(Output& out, std::vector<Shown> dims, std::size_t width)
      : out_(out),
        dims_(std::move(dims)),
        width_(width),
        columns_(out.columns() > 0 ? out.columns() : kColumns),
        index_(dims_.size(), 0) {}

  void add(const std::string& text) {
    const std::size_t rank = dims_.size();
    std::size_t opened = 0;
    while (opened < rank && index_[rank - 1 - opened] == 0) ++opened;
    if (opened == 0 && rank > 0) {
      if (dims_[rank - 1].is_summarized && index_[rank - 1] == kEdge) write_next("...");
      write_next(padded(text));
    } else {
      out_.write(std::string(rank - opened, ' ') + std::string(opened, '['));
      used_ = rank;
      write_cell(padded(text));
    }
    advance();
  }

 private:
  std::string padded(const std::string& text) const {
    return std::string(width_ - std::min(width_, text.size()), ' ') + text;
  }

  void write_cell(const std::string& cell) {
    out_.write(cell);
    used_ += cell.size();
  }

  // Writes a cell after a comma, on the next line if this one is full.
  void write_next(const std::string& cell) {
    constexpr std::size_t kAround = 3;  // the comma and the space before it, and what may follow it
    if (used_ + cell.size() + kAround > columns_) {
      out_.write(",\n" + std::string(dims_.size(), ' '));
      used_ = dims_.size();
    } else {
      write_cell(", ");
    }
    write_cell(cell);
  }

  // Goes to the next index, and closes the brackets of the dimensions that end.
  void advance() {
    const std::size_t rank = dims_.size();
    std::size_t closed = 0;
    while (closed < rank && ++index_[rank - 1 - closed] == dims_[rank - 1 - closed].size) {
      index_[rank - 1 - closed] = 0;
      ++closed;
    }
    out_.write(std::string(closed, ']'));
    if (closed == rank) {
      out_.write("\n");
    } else if (closed > 0) {
      const std::string line_end = "," + std::string(closed, '\n');
      out_.write(line_end);
      const std::size_t d = rank - 1 - closed;
      if (dims_[d].is_summarized && index_[d] == kEdge) out_.write(std::string(d + 1, ' ') + "..." + line_end);
    }
  }

  Output& out_;
  std::vector<Shown> dims_;
  std::size_t width_, columns_, used_ = 0;
  std::vector<std::int64_t> index_;
};

}  // namespace

void compare_read(Session& session, const checkpoint::Checkpoint& checkpoint, const TensorReader& reader) {
  reader.verify_complete_chunks();
  checkpoint.compare_rest(&session.cancellation);
}

void print_values(Session& session, const checkpoint::Checkpoint& checkpoint, const TensorReader& reader,
                  const TensorSlice& slice, DType dtype, bool all) {
  if (slice.elements() == 0) {
    session.out.write("[]\n");
    return;
  }
  const std::vector<Shown> shown = shown_dims(slice, all);
  Elements elements(session, reader, slice, dtype, shown);
  std::size_t width = 0;
  elements.for_each([&](const std::string& text) { width = std::max(width, text.size()); });
  compare_read(session, checkpoint, reader);
  Brackets brackets(session.out, shown, width);
  elements.for_each([&](const std::string& text) { brackets.add(text); });
}

}  // namespace tessera::cli
