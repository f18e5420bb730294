#pragma once
// A store that answers each call or fails it: c10d's clients wait for an answer without a limit, even if the network is
// down or the server is silent.

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/c10d.h"

namespace tessera::comm {

// Runs functions one after another in a thread of its own. Thread-safe.
class DeadlineWorker {
 public:
  DeadlineWorker();
  DeadlineWorker(const DeadlineWorker&) = delete;
  DeadlineWorker& operator=(const DeadlineWorker&) = delete;
  // Does not wait for a function that is late; its thread ends after it.
  ~DeadlineWorker();

  // Returns after `f` has ended and rethrows its exception. Throws std::runtime_error if that takes longer than
  // `deadline`, and at once in all later calls. `f` must own what it uses.
  void run(std::chrono::milliseconds deadline, std::function<void()> f);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// Forwards to another store, which it makes in the thread of its worker. A call that waits for a key has the timeout of
// the store, others `answer` to be answered; then they throw std::runtime_error, and so do all later calls.
class DeadlineStore final : public ::c10d::Store {
 public:
  // Throws std::runtime_error if `make` does not return within `timeout`.
  DeadlineStore(std::function<StorePtr()> make, std::chrono::milliseconds timeout, std::chrono::milliseconds answer);
  DeadlineStore(const DeadlineStore&) = delete;
  DeadlineStore& operator=(const DeadlineStore&) = delete;
  // Frees the other store, and waits at most `answer` for it: a server in it waits for the rest of a message of which
  // it has received a part.
  ~DeadlineStore() override;

  using Key = std::string;
  using Value = std::vector<std::uint8_t>;
  using ::c10d::Store::set;
  void set(const Key& key, const Value& value) override;
  using ::c10d::Store::compareSet;
  Value compareSet(const Key& key, const Value& expected, const Value& wanted) override;
  Value get(const Key& key) override;
  std::int64_t add(const Key& key, std::int64_t value) override;
  bool deleteKey(const Key& key) override;
  bool check(const std::vector<Key>& keys) override;
  std::int64_t getNumKeys() override;
  void wait(const std::vector<Key>& keys) override;
  void wait(const std::vector<Key>& keys, const std::chrono::milliseconds& timeout) override;
  const std::chrono::milliseconds& getTimeout() const noexcept override { return timeout_; }
  void setTimeout(const std::chrono::milliseconds& timeout) override;
  // Overrides a function that stores have since LibTorch 2.8.
  StorePtr clone();

 private:
  template <typename F>
  auto call(std::chrono::milliseconds deadline, F f);

  std::shared_ptr<DeadlineWorker> worker_;
  StorePtr store_;
  std::chrono::milliseconds answer_;
};

}  // namespace tessera::comm
