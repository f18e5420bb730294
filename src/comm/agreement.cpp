// Comparison of the ranks' calls before their data is sent, and agreement on outcomes.

#include <ATen/ops/empty.h>

#include <fmt/ranges.h>

#include <algorithm>

#include "comm/exceptions.h"
#include "comm/group_impl.h"
#include "tessera/base/rank_errors.h"

namespace tessera {

void CallArguments::add_line(std::string_view line) {
  for (const char c : line) {
    if (c == '\n') {
      text_ += "; ";
    } else {
      text_ += c;
    }
  }
  text_ += '\n';
}

CallArguments& CallArguments::add_list(std::string_view name, std::span<const std::int64_t> values) {
  return add(name, fmt::format("[{}]", fmt::join(values, ", ")));
}

namespace {

// What each rank sends: a fingerprint of its call, whether it refuses, and a number.
constexpr std::int64_t kRecordWords = 3;

std::uint64_t fingerprint_of(std::string_view text) {
  std::uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

// A rank's call as text: the operation, a line break, and a line for each argument.
std::vector<std::string> lines_of(std::string_view text) {
  std::vector<std::string> lines;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    lines.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

// Throws for the first rank whose call differs from that of rank 0.
[[noreturn]] void fail_for_difference(std::string_view operation, const std::vector<std::string>& calls) {
  const std::vector<std::string> first = lines_of(calls[0]);
  for (std::size_t r = 1; r < calls.size(); ++r) {
    if (calls[r] == calls[0]) continue;
    const std::vector<std::string> other = lines_of(calls[r]);
    if (first[0] != other[0]) {
      fail(ErrorCode::invalid_argument, "{}: rank 0 calls {} and rank {} calls {}, expected the same call on all ranks",
           operation, first[0], r, other[0]);
    }
    for (std::size_t i = 1; i < std::max(first.size(), other.size()); ++i) {
      const std::string ours = i < first.size() ? first[i] : "no such argument",
                        theirs = i < other.size() ? other[i] : "no such argument";
      if (ours == theirs) continue;
      fail(ErrorCode::invalid_argument, "{}: rank 0 has {} and rank {} has {}, expected the same on all ranks",
           operation, ours, r, theirs);
    }
  }
  fail(ErrorCode::internal, "{}: the fingerprints of equal calls differ", operation);
}

}  // namespace

std::vector<std::int64_t> ProcessGroup::Impl::compare_calls(const std::shared_ptr<Impl>& self,
                                                            std::string_view operation,
                                                            const std::function<void(CallArguments&)>& describe,
                                                            std::int64_t number, std::string_view compared_as) {
  CallArguments arguments;
  if (is_alone()) {
    describe(arguments);
    return {number};
  }
  std::exception_ptr failure;
  try {
    describe(arguments);
  } catch (...) {
    failure = std::current_exception();
  }
  std::string text = std::string(compared_as.empty() ? operation : compared_as) + '\n';
  if (!failure) text += arguments.text();
  struct Comparing {
    explicit Comparing(bool& flag_in) : flag(flag_in) { flag = true; }
    ~Comparing() { flag = false; }
    Comparing(const Comparing&) = delete;
    Comparing& operator=(const Comparing&) = delete;
    bool& flag;
  };
  const Comparing comparing(is_comparing_);
  const at::Tensor mine = at::empty({kRecordWords}, at::kLong), all = at::empty({size() * kRecordWords}, at::kLong);
  auto* record = mine.data_ptr<std::int64_t>();
  record[0] = static_cast<std::int64_t>(fingerprint_of(text));
  record[1] = failure ? 1 : 0;
  record[2] = number;
  comm::start_all_gather(self, transports.control, operation, all, mine).wait();

  const auto* records = all.data_ptr<std::int64_t>();
  std::vector<std::int64_t> numbers;
  bool any_refuses = false, all_equal = true;
  for (int r = 0; r < size(); ++r) {
    any_refuses = any_refuses || records[r * kRecordWords + 1] != 0;
    all_equal = all_equal && records[r * kRecordWords] == records[0];
    numbers.push_back(records[r * kRecordWords + 2]);
  }
  if (!any_refuses && all_equal) return numbers;

  // The reasons of ranks that refuse, else the calls of all.
  Bytes reason;
  if (failure) {
    reason.push_back(static_cast<std::uint8_t>(comm::code_of(failure)));
    append(reason, comm::message_of(failure));
  } else if (!any_refuses) {
    append(reason, text);
  }
  const at::Tensor size_of_mine = at::empty({1}, at::kLong), size_of_all = at::empty({size()}, at::kLong);
  size_of_mine.data_ptr<std::int64_t>()[0] = static_cast<std::int64_t>(reason.size());
  comm::start_all_gather(self, transports.control, operation, size_of_all, size_of_mine).wait();
  const auto* sizes = size_of_all.data_ptr<std::int64_t>();
  const std::vector<Bytes> reasons = comm::all_gather_bytes(self, operation, reason, {sizes, sizes + size()});
  if (any_refuses) {
    std::vector<RankFailure> failed;
    for (std::size_t r = 0; r < reasons.size(); ++r) {
      if (reasons[r].empty()) continue;
      failed.push_back({static_cast<int>(r), static_cast<ErrorCode>(reasons[r][0]),
                        std::string(as_text(ByteView(reasons[r]).subspan(1)))});
    }
    fail_for_ranks(operation, failed, size());
  }
  std::vector<std::string> texts;
  texts.reserve(reasons.size());
  for (const Bytes& one : reasons) texts.emplace_back(as_text(one));
  fail_for_difference(where(operation), texts);
}

void ProcessGroup::check_call(std::string_view operation, const std::function<void(CallArguments&)>& check) const {
  impl_->compare_calls(impl_, operation, check);
}

void ProcessGroup::agree(std::string_view step, const std::exception_ptr& failure) const {
  // Steps may name paths that differ between hosts.
  const auto rethrow = [&](CallArguments&) {
    if (failure) std::rethrow_exception(failure);
  };
  impl_->compare_calls(impl_, step, rethrow, 0, "an agreement");
}

}  // namespace tessera
