#include "tessera/state/async_save.h"

#include <numeric>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "state/local_state.h"
#include "state/process_group_link.h"
#include "tessera/base/error.h"

namespace tessera {

namespace {

ProcessGroup same_ranks(const ProcessGroup& group) {
  std::vector<int> ranks(static_cast<std::size_t>(group.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return *group.subgroup(ranks);
}

}  // namespace

struct AsyncSaver::Impl {
  Impl(const ProcessGroup& group_in, const AsyncSaveOptions& options_in)
      : group(group_in),
        options(options_in),
        own_group(same_ranks(group_in)),
        link(own_group, options_in.coordinator_rank) {
    options.cache = options.remember_plans ? &cache : nullptr;
  }

  // Waits for the thread of the last save.
  void join() {
    if (thread.joinable()) thread.join();
  }
  void throw_last() {
    if (std::exception_ptr failure = std::exchange(failed, nullptr); failure && options.throw_at_next_call) {
      std::rethrow_exception(failure);
    }
  }
  bool is_busy() const { return last.valid() && last.wait_for(std::chrono::seconds(0)) != std::future_status::ready; }

  ProcessGroup group;  // the trainer's
  AsyncSaveOptions options;
  ProcessGroup own_group;  // the thread's
  ProcessGroupLink link;
  checkpoint::SavePlanCache cache;
  StagingArea staging;
  checkpoint::FlatState staged;
  std::shared_future<SaveReport> last;
  std::exception_ptr failed;  // error of the last save; the thread sets it before `last` is ready
  std::thread thread;
};

AsyncSaver::AsyncSaver(const ProcessGroup& group, const AsyncSaveOptions& options) {
  group.check_call("make an AsyncSaver", [&](CallArguments& arguments) {
    arguments.add("when_busy", static_cast<int>(options.when_busy))
        .add("throw_at_next_call", options.throw_at_next_call)
        .add("remember_plans", options.remember_plans);
    describe_coordinator(group, options.coordinator_rank, arguments);
  });
  impl_ = std::make_unique<Impl>(group, options);
}

AsyncSaver::~AsyncSaver() { impl_->join(); }

std::shared_future<SaveReport> AsyncSaver::save(const StateDict& state, const std::filesystem::path& directory) {
  return save(state, checkpoint::file_system_storage(directory));
}

std::shared_future<SaveReport> AsyncSaver::save(const StateDict& state,
                                                const std::shared_ptr<checkpoint::Storage>& storage,
                                                std::function<void()> then) {
  Impl& impl = *impl_;
  if (impl.options.when_busy == AsyncSaveOptions::WhenBusy::refuse) {
    impl.group.check_call("begin to save in the background", [&](CallArguments&) {
      if (impl.is_busy()) {
        fail(ErrorCode::invalid_argument,
             "the previous save still runs, expected it to have finished; wait for it first");
      }
    });
  }
  impl.join();
  impl.staged = convert_on_all_ranks(
      impl.group, "save in the background", state,
      [&](CallArguments& arguments) {
        impl.throw_last();
        describe_save(storage, impl.group, impl.options, arguments);
        arguments.add("then", then ? "given" : "null");
      },
      [&](const StateDict& values) { return impl.staging.copy(values, impl.group, impl.options); });
  std::promise<checkpoint::WriteReport> promise;
  impl.last = promise.get_future().share();
  impl.thread = std::thread([&impl, storage, then = std::move(then), promise = std::move(promise)]() mutable {
    try {
      checkpoint::WriteReport report = checkpoint::write_state(impl.staged, storage, impl.link, impl.options);
      if (then) impl.own_group.agree_on("after the save", then);
      promise.set_value(std::move(report));
    } catch (...) {
      impl.failed = std::current_exception();
      promise.set_exception(std::current_exception());
    }
  });
  return impl.last;
}

void AsyncSaver::wait() {
  impl_->join();
  impl_->throw_last();
}

bool AsyncSaver::is_busy() const { return impl_->is_busy(); }

std::uint64_t AsyncSaver::staging_bytes() const { return impl_->staging.size_bytes(); }

}  // namespace tessera
