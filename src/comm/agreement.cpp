// Comparison of the ranks' calls before their data is sent, and agreement on outcomes.

#include <ATen/ops/empty.h>

#include <fmt/ranges.h>

#include <algorithm>

#include "comm/exceptions.h"
#include "comm/group_impl.h"
#include "tessera/base/function_ref.h"
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

// Throws for the first rank whose call differs from that of the first one. `ranks`: of the world.
[[noreturn]] void fail_for_difference(std::string_view operation, const std::vector<int>& ranks,
                                      const std::vector<std::string>& calls) {
  const std::vector<std::string> first = lines_of(calls[0]);
  for (std::size_t r = 1; r < calls.size(); ++r) {
    if (calls[r] == calls[0]) continue;
    const std::vector<std::string> other = lines_of(calls[r]);
    if (first[0] != other[0]) {
      fail(ErrorCode::invalid_argument,
           "{}: rank {} calls {} and rank {} calls {}, expected the same call on all ranks", operation, ranks[0],
           first[0], ranks[r], other[0]);
    }
    for (std::size_t i = 1; i < std::max(first.size(), other.size()); ++i) {
      const std::string ours = i < first.size() ? first[i] : "no such argument",
                        theirs = i < other.size() ? other[i] : "no such argument";
      if (ours == theirs) continue;
      fail(ErrorCode::invalid_argument, "{}: rank {} has {} and rank {} has {}, expected the same on all ranks",
           operation, ranks[0], ours, ranks[r], theirs);
    }
  }
  fail(ErrorCode::internal, "{}: the fingerprints of equal calls differ", operation);
}

}  // namespace

std::vector<std::int64_t> comm::compare_calls(const CallExchange& exchange, std::string_view operation,
                                              std::string_view where, std::string_view compared_as,
                                              FunctionRef<void(CallArguments&)> describe, std::int64_t number) {
  CallArguments arguments;
  std::exception_ptr failure;
  try {
    describe(arguments);
  } catch (...) {
    failure = std::current_exception();
  }
  std::string text = std::string(compared_as) + '\n';
  if (!failure) text += arguments.text();
  const std::vector<std::int64_t> records =
      exchange.gather({static_cast<std::int64_t>(fingerprint_of(text)), failure ? 1 : 0, number});
  std::vector<std::int64_t> numbers;
  bool any_refuses = false, all_equal = true;
  for (std::size_t i = 0; i < exchange.ranks.size(); ++i) {
    any_refuses = any_refuses || records[i * kRecordWords + 1] != 0;
    all_equal = all_equal && records[i * kRecordWords] == records[0];
    numbers.push_back(records[i * kRecordWords + 2]);
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
  const std::vector<Bytes> reasons =
      exchange.gather_bytes(reason, exchange.gather({static_cast<std::int64_t>(reason.size())}));
  if (any_refuses) {
    std::vector<RankFailure> failed;
    for (std::size_t i = 0; i < reasons.size(); ++i) {
      if (reasons[i].empty()) continue;
      failed.push_back({exchange.ranks[i], static_cast<ErrorCode>(reasons[i][0]),
                        std::string(as_text(ByteView(reasons[i]).subspan(1)))});
    }
    fail_for_ranks(operation, failed, static_cast<int>(exchange.ranks.size()));
  }
  std::vector<std::string> texts;
  texts.reserve(reasons.size());
  for (const Bytes& one : reasons) texts.emplace_back(as_text(one));
  fail_for_difference(where, exchange.ranks, texts);
}

std::vector<std::int64_t> ProcessGroup::Impl::compare_calls(const std::shared_ptr<Impl>& self,
                                                            std::string_view operation,
                                                            FunctionRef<void(CallArguments&)> describe,
                                                            std::int64_t number, std::string_view compared_as) {
  if (is_alone()) {
    CallArguments arguments;
    describe(arguments);
    return {number};
  }
  struct Comparing {
    explicit Comparing(bool& flag_in) : flag(flag_in) { flag = true; }
    ~Comparing() { flag = false; }
    Comparing(const Comparing&) = delete;
    Comparing& operator=(const Comparing&) = delete;
    bool& flag;
  };
  comm::CallExchange exchange;
  exchange.ranks = world_ranks;
  exchange.gather = [&](const std::vector<std::int64_t>& numbers) {
    const Comparing comparing(is_comparing_);
    const auto words = static_cast<std::int64_t>(numbers.size());
    const at::Tensor mine = at::empty({words}, at::kLong), all = at::empty({size() * words}, at::kLong);
    std::copy(numbers.begin(), numbers.end(), mine.data_ptr<std::int64_t>());
    comm::start_all_gather(self, transports.control, operation, all, mine).wait();
    return std::vector<std::int64_t>(all.data_ptr<std::int64_t>(), all.data_ptr<std::int64_t>() + all.numel());
  };
  exchange.gather_bytes = [&](ByteView bytes, const std::vector<std::int64_t>& sizes) {
    const Comparing comparing(is_comparing_);
    return comm::all_gather_bytes(self, operation, bytes, sizes);
  };
  return comm::compare_calls(exchange, operation, where(operation), compared_as.empty() ? operation : compared_as,
                             describe, number);
}

void ProcessGroup::check_call(std::string_view operation, FunctionRef<void(CallArguments&)> check) const {
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
