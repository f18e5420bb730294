#include "comm/rendezvous/deadline_store.h"

#include <fmt/format.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <utility>

namespace tessera::comm {

using std::chrono::milliseconds;

struct DeadlineWorker::State {
  struct Task {
    std::function<void()> f;
    bool is_done = false;
    std::exception_ptr error;
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Task>> tasks;
  bool stops = false, is_late = false;

  void work() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return stops || !tasks.empty(); });
      if (tasks.empty()) return;
      const std::shared_ptr<Task> task = tasks.front();
      tasks.pop_front();
      lock.unlock();
      std::exception_ptr error;
      try {
        task->f();
      } catch (...) {
        error = std::current_exception();
      }
      task->f = nullptr;
      lock.lock();
      task->error = std::move(error);
      task->is_done = true;
      changed.notify_all();
    }
  }
};

DeadlineWorker::DeadlineWorker() : state_(std::make_shared<State>()) {
  std::thread([state = state_] { state->work(); }).detach();
}

DeadlineWorker::~DeadlineWorker() {
  const std::lock_guard lock(state_->mutex);
  state_->stops = true;
  state_->changed.notify_all();
}

void DeadlineWorker::run(milliseconds deadline, std::function<void()> f) {
  const auto task = std::make_shared<State::Task>();
  task->f = std::move(f);
  std::unique_lock lock(state_->mutex);
  if (state_->is_late) throw std::runtime_error("an earlier call was not answered");
  state_->tasks.push_back(task);
  state_->changed.notify_all();
  if (!state_->changed.wait_for(lock, deadline, [&] { return task->is_done; })) {
    state_->is_late = true;
    throw std::runtime_error(fmt::format("no answer within {} ms", deadline.count()));
  }
  if (task->error) std::rethrow_exception(task->error);
}

// Runs `f` on the store in the worker's thread.
template <typename F>
auto DeadlineStore::call(milliseconds deadline, F f) {
  using Result = std::invoke_result_t<F, ::c10d::Store&>;
  if constexpr (std::is_void_v<Result>) {
    worker_->run(deadline, [store = store_, f = std::move(f)] { f(*store); });
  } else {
    const auto result = std::make_shared<Result>();
    worker_->run(deadline, [store = store_, f = std::move(f), result] { *result = f(*store); });
    return std::move(*result);
  }
}

DeadlineStore::DeadlineStore(std::function<StorePtr()> make, milliseconds timeout, milliseconds answer)
    : ::c10d::Store(timeout), worker_(std::make_shared<DeadlineWorker>()), answer_(answer) {
  const auto made = std::make_shared<StorePtr>();
  worker_->run(timeout, [make = std::move(make), made] { *made = make(); });
  store_ = *made;
}

DeadlineStore::~DeadlineStore() {
  const auto last = std::make_shared<StorePtr>(std::move(store_));
  try {
    worker_->run(answer_, [last] { last->reset(); });
  } catch (const std::exception&) {
    // An earlier call is not answered yet, or this one is late.
    std::thread([last] { last->reset(); }).detach();
  }
}

void DeadlineStore::set(const Key& key, const Value& value) {
  call(answer_, [key, value](::c10d::Store& store) { store.set(key, value); });
}
DeadlineStore::Value DeadlineStore::compareSet(const Key& key, const Value& expected, const Value& wanted) {
  return call(answer_,
              [key, expected, wanted](::c10d::Store& store) { return store.compareSet(key, expected, wanted); });
}
DeadlineStore::Value DeadlineStore::get(const Key& key) {
  return call(timeout_ + answer_, [key](::c10d::Store& store) { return store.get(key); });
}
std::int64_t DeadlineStore::add(const Key& key, std::int64_t value) {
  return call(answer_, [key, value](::c10d::Store& store) { return store.add(key, value); });
}
bool DeadlineStore::deleteKey(const Key& key) {
  return call(answer_, [key](::c10d::Store& store) { return store.deleteKey(key); });
}
bool DeadlineStore::check(const std::vector<Key>& keys) {
  return call(answer_, [keys](::c10d::Store& store) { return store.check(keys); });
}
std::int64_t DeadlineStore::getNumKeys() {
  return call(answer_, [](::c10d::Store& store) { return store.getNumKeys(); });
}
void DeadlineStore::wait(const std::vector<Key>& keys) { wait(keys, timeout_); }
void DeadlineStore::wait(const std::vector<Key>& keys, const milliseconds& timeout) {
  call(timeout + answer_, [keys, timeout](::c10d::Store& store) { store.wait(keys, timeout); });
}
void DeadlineStore::setTimeout(const milliseconds& timeout) {
  timeout_ = timeout;
  call(answer_, [timeout](::c10d::Store& store) { store.setTimeout(timeout); });
}

namespace {

template <typename S>
c10::intrusive_ptr<S> clone_of(const c10::intrusive_ptr<S>& store) {
  if constexpr (requires { store->clone(); }) {
    return store->clone();
  } else {
    return store;
  }
}

}  // namespace

StorePtr DeadlineStore::clone() {
  return c10::make_intrusive<DeadlineStore>([store = store_] { return clone_of(store); }, timeout_, answer_);
}

}  // namespace tessera::comm
