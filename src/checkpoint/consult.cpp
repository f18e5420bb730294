#include "checkpoint/consult.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "checkpoint/byte_cursor.h"
#include "tessera/base/function_ref.h"
#include "tessera/base/rank_errors.h"

namespace tessera::checkpoint {
namespace {

// Added to the status byte of an OutcomeUnknown.
constexpr std::uint8_t kOutcomeUnknown = 0x80;

Bytes failure(ErrorCode code, std::string_view message, std::uint8_t flags = 0) {
  Bytes bytes(1 + message.size());
  bytes[0] = static_cast<std::uint8_t>((1 + static_cast<std::uint8_t>(code)) | flags);
  std::copy(message.begin(), message.end(), bytes.begin() + 1);
  return bytes;
}

// Returns the result of `f` after a status byte of 0. If `f` throws, returns 1 + the error's code and its message.
template <typename F>
Bytes outcome_of(const F& f) {
  try {
    Bytes bytes = f();
    bytes.insert(bytes.begin(), 0);
    return bytes;
  } catch (const OutcomeUnknown& error) {
    return failure(error.code(), error.what(), kOutcomeUnknown);
  } catch (const Error& error) {
    return failure(error.code(), error.what());
  } catch (const std::exception& error) {
    return failure(ErrorCode::internal, error.what());
  } catch (...) {
    return failure(ErrorCode::internal, "an exception of unknown type");
  }
}

std::optional<Error> failure_in(const Bytes& bytes) {
  if (bytes.empty()) return Error(ErrorCode::corrupt, "a rank sent 0 bytes, expected a status byte");
  if (bytes[0] == 0) return std::nullopt;
  return Error(static_cast<ErrorCode>((bytes[0] & ~kOutcomeUnknown) - 1),
               std::string(as_text(ByteView(bytes).subspan(1))));
}

}  // namespace

Bytes consult(RankLink& link, std::string_view step, FunctionRef<Bytes()> request,
              FunctionRef<std::vector<Bytes>(std::vector<Bytes>)> answer, bool* known_to_have_failed) {
  std::vector<Bytes> all = link.gather(outcome_of(request));
  std::vector<Bytes> answers;
  if (link.is_coordinator()) {
    const Bytes verdict = outcome_of([&] {
      std::vector<RankFailure> failures;
      for (std::size_t r = 0; r < all.size(); ++r) {
        if (const auto failure = failure_in(all[r])) {
          failures.push_back({static_cast<int>(r), failure->code(), failure->what()});
        }
        if (!all[r].empty()) all[r].erase(all[r].begin());
      }
      if (!failures.empty() && link.size() == 1) throw Error(failures[0].code, failures[0].message);
      if (!failures.empty()) fail_for_ranks(step, failures, link.size());
      answers = answer(std::move(all));
      return Bytes();
    });
    if (verdict[0] != 0) {
      answers.assign(static_cast<std::size_t>(link.size()), verdict);
    } else {
      for (Bytes& part : answers) part.insert(part.begin(), 0);
    }
  }
  Bytes mine = link.scatter(answers);
  if (const auto failure = failure_in(mine)) {
    if (known_to_have_failed != nullptr) *known_to_have_failed = (mine[0] & kOutcomeUnknown) == 0;
    throw *failure;
  }
  mine.erase(mine.begin());
  return mine;
}

}  // namespace tessera::checkpoint
