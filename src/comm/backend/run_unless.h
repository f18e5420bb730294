#pragma once
// Calls of backends that wait for other ranks, even dead ones, and cannot be ended.

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include "tessera/base/function_ref.h"

namespace tessera::comm {

// Runs `call` in a thread of its own, and returns what it returns. If there is a failure, or `limit` has passed, throws
// std::runtime_error, and the thread is abandoned: `call` owns all that it uses.
template <typename F>
std::invoke_result_t<F> run_unless(FunctionRef<std::string()> failure, std::optional<std::chrono::milliseconds> limit,
                                   F call) {
  using Result = std::invoke_result_t<F>;
  constexpr std::chrono::milliseconds kSlice(100);
  const auto task = std::make_shared<std::packaged_task<Result()>>(std::move(call));
  std::future<Result> result = task->get_future();
  const auto begin = std::chrono::steady_clock::now();
  std::thread([task] { (*task)(); }).detach();
  while (result.wait_for(kSlice) != std::future_status::ready) {
    if (const std::string why = failure(); !why.empty()) throw std::runtime_error(why);
    if (limit && std::chrono::steady_clock::now() - begin > *limit)
      throw std::runtime_error(fmt::format("no connection after {} ms", limit->count()));
  }
  return result.get();
}

}  // namespace tessera::comm
