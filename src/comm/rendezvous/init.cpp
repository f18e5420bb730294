#include "tessera/comm/init.h"

#include <fmt/format.h>

#include <numeric>

#include "comm/group_impl.h"
#include "comm/host/connect.h"
#include "comm/rendezvous/meeting.h"
#include "comm/rendezvous/store.h"
#include "comm/rendezvous/world.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/timeout.h"

namespace tessera {

namespace {

void check(const InitOptions& options) {
  if (options.world_size < 1) {
    fail(ErrorCode::invalid_argument, "init process group: {} ranks, expected at least 1", options.world_size);
  }
  if (options.rank < 0 || options.rank >= options.world_size) {
    fail(ErrorCode::invalid_argument, "init process group: rank {} of {}, expected 0 to {}", options.rank,
         options.world_size, options.world_size - 1);
  }
  if (options.world_size > 1 && options.master_addr.empty()) {
    fail(ErrorCode::invalid_argument, "init process group: master_addr is '', expected the address of rank 0's host");
  }
  if (options.timeout.count() <= 0 || options.liveness.count() <= 0) {
    fail(ErrorCode::invalid_argument, "init process group: timeout {} ms, liveness {} ms, expected more than 0",
         options.timeout.count(), options.liveness.count());
  }
}

}  // namespace

ProcessGroup comm::make_world(const World& world) {
  auto group = std::make_shared<ProcessGroup::Impl>();
  group->backend_name = world.backend;
  group->rank = world.rank;
  group->world_ranks.resize(static_cast<std::size_t>(world.size));
  std::iota(group->world_ranks.begin(), group->world_ranks.end(), 0);
  group->world_size = world.size;
  group->timeout = world.timeout;
  group->store = world.store;
  group->liveness = world.liveness;
  group->connect("init process group");
  use_host_memory(group);
  // Keeps a rank from leaving while others still connect to it.
  ProcessGroup met(std::move(group));
  met.barrier();
  return met;
}

ProcessGroup init_process_group(const InitOptions& given) {
  check(given);
  if (given.world_size == 1) return {};
  InitOptions options = given;
  options.timeout = bounded(given.timeout);
  options.liveness = bounded(given.liveness);
  const comm::StoreAddress address = {options.master_addr,
                                      options.master_port,
                                      options.rank,
                                      options.timeout,
                                      std::min(options.liveness, options.timeout),
                                      options.agent_store};
  const comm::StorePtr store = comm::connect_store(address);
  comm::World world;
  world.backend = options.backend;
  world.rank = options.rank;
  world.size = options.world_size;
  world.timeout = options.timeout;
  std::string prefix = "tessera";
  if (options.agent_store) {
    const comm::StorePtr meeting = comm::with_prefix("tessera/start", store);
    prefix = fmt::format("tessera/{}", comm::meet(*meeting, options.rank, options.world_size, options.timeout));
  }
  world.store = comm::with_prefix(prefix + "/world", store);
  const comm::StorePtr own = comm::reconnect_store(address);
  world.liveness =
      std::make_shared<comm::Liveness>(comm::with_prefix(prefix + "/live", own), address.is_ours(), options.rank,
                                       options.world_size, options.liveness, address.keeper());
  return comm::make_world(world);
}

}  // namespace tessera
