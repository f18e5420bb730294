#include "comm/host/connect.h"

#include <ATen/ops/empty.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

#include "comm/backend/run_unless.h"
#include "comm/exceptions.h"
#include "comm/host/backend.h"
#include "comm/host/hosts.h"
#include "comm/host/place.h"
#include "comm/rendezvous/store.h"
#include "tessera/base/function_ref.h"

namespace tessera::comm {

namespace {

constexpr char kConnect[] = "the connection through shared memory";

// The connections of strangers that are kept while ranks connect.
constexpr std::size_t kMostStrangers = 64;

using Secret = std::array<std::uint64_t, 2>;

// What ranks tell each other over c10d.
struct Introduction {
  char place[160] = {};  // the same for ranks of a host that can connect; empty if this rank does not share memory
  Secret name = {};      // of the socket of rank 0, which anyone on the host can see
  Secret secret = {};    // which connections to it begin with
  std::uint64_t process = 0;
  cpu_set_t processors = {};
};

// What a connection begins with.
struct Greeting {
  Secret secret = {};
  int rank = 0;
};

Secret random_secret() {
  std::random_device device;
  Secret secret;
  for (std::uint64_t& word : secret) word = (static_cast<std::uint64_t>(device()) << 32) | device();
  return secret;
}

std::string socket_name(const Secret& name) { return fmt::format("tessera-{:016x}{:016x}", name[0], name[1]); }

// The mappings of this process, by the secret of their group, through which threads find them.
class Mappings {
 public:
  static Mappings& all() {
    static auto& mappings = *new Mappings;
    return mappings;
  }
  void add(const Secret& secret, const std::shared_ptr<HostMapping>& mapping) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(mappings_, [](const auto& entry) { return entry.second.expired(); });
    mappings_.insert_or_assign(secret, mapping);
  }
  std::shared_ptr<HostMapping> find(const Secret& secret) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = mappings_.find(secret);
    return found == mappings_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<Secret, std::weak_ptr<HostMapping>> mappings_;
};

// The ranks of the group on each host, in their order; hosts in the order of their first ranks.
using RanksOfHosts = HostsBackend::RanksOfHosts;

// Returns nothing unless all ranks share memory, and each host has as many of them, at least two.
RanksOfHosts hosts_of(const std::vector<Introduction>& all) {
  std::vector<std::string> places;
  RanksOfHosts hosts;
  for (std::size_t r = 0; r < all.size(); ++r) {
    const std::string place = all[r].place;
    if (place.empty()) return {};
    const auto known = std::find(places.begin(), places.end(), place) - places.begin();
    if (known == std::ssize(places)) {
      places.push_back(place);
      hosts.emplace_back();
    }
    hosts[static_cast<std::size_t>(known)].push_back(static_cast<int>(r));
  }
  const bool is_even = std::all_of(hosts.begin(), hosts.end(), [&](const std::vector<int>& ranks) {
    return ranks.size() == hosts[0].size() && ranks.size() > 1 && ranks.size() <= HostMapping::kMostRanks;
  });
  return is_even ? hosts : RanksOfHosts();
}

// The steps of one rank. Each may fail on a rank alone, so the ranks agree after it.
class Connecting {
 public:
  explicit Connecting(const GroupPtr& group) : group_(group) {}

  // Connects this rank with the others of its host. Returns null if the group stays on c10d.
  std::unique_ptr<Host> run() {
    if (group_->size() == 1) return nullptr;
    Introduction own;
    own.process = process_number();
    ::sched_getaffinity(0, sizeof(own.processors), &own.processors);
    attempt([&] {
      const std::string place = host_place("net", "TESSERA_HOST_MEMORY");
      if (place.size() < sizeof(own.place)) std::memcpy(own.place, place.data(), place.size());
      own.name = random_secret();
      own.secret = random_secret();
      listening_ = listen_at(socket_name(own.name));  // this rank may be the first of its host
    });
    if (!is_good_) own.place[0] = '\0';
    all_ = gather(own);
    hosts_ = hosts_of(all_);
    if (hosts_.empty()) return nullptr;
    for (std::size_t h = 0; h < hosts_.size(); ++h) {
      const auto found = std::find(hosts_[h].begin(), hosts_[h].end(), group_->rank);
      if (found == hosts_[h].end()) continue;
      host_index_ = static_cast<int>(h);
      place_ = static_cast<int>(found - hosts_[h].begin());
    }
    const Introduction& first = of_place(0);
    std::shared_ptr<HostMapping> mapping;
    attempt([&] {
      if (place_ == 0) {
        mapping = std::make_shared<HostMapping>(make_shared_memory(HostMapping::size_bytes(ranks())), ranks());
        Mappings::all().add(own.secret, mapping);
      } else if (first.process != own.process) {
        sockets_.push_back(connect_to(socket_name(first.name)));
      }
    });
    if (!all_are_good()) return nullptr;
    attempt([&] {
      if (place_ == 0) {
        accept_all(*mapping);
      } else if (first.process == own.process) {
        mapping = Mappings::all().find(first.secret);
      } else {
        const Greeting greeting{first.secret, place_};
        send_bytes(sockets_[0], &greeting, sizeof(greeting));
        // Threads of a process that is not the first rank's use one mapping, too.
        Descriptor memory = receive_descriptor(sockets_[0], patience());
        mapping = shared_in_process(first.secret, std::move(memory));
      }
      if (mapping != nullptr) host_ = std::make_unique<Host>(mapping, place_, ranks(), std::move(sockets_), may_spin());
    });
    is_good_ = is_good_ && host_ != nullptr;
    if (!all_are_good()) return nullptr;
    return std::move(host_);
  }

  const RanksOfHosts& hosts() const { return hosts_; }
  // The index of this rank's host, and of the rank on it.
  int host_index() const { return host_index_; }
  int place() const { return place_; }

 private:
  void attempt(FunctionRef<void()> step) {
    if (!is_good_) return;
    try {
      step();
    } catch (const std::exception&) {  // the group stays on c10d
      is_good_ = false;
      // Who waits at the other end of a connection fails as well.
      listening_ = Descriptor();
      sockets_.clear();
    }
  }

  template <typename T>
  std::vector<T> gather(const T& own) {
    const auto size_bytes = static_cast<std::int64_t>(sizeof(T));
    const at::Tensor in = at::empty({size_bytes}, at::kByte), out = at::empty({group_->size() * size_bytes}, at::kByte);
    std::memcpy(in.data_ptr(), &own, sizeof(T));
    start_all_gather(group_, group_->transports.control, kConnect, out, in, /*is_counted=*/false).wait();
    std::vector<T> all(static_cast<std::size_t>(group_->size()));
    std::memcpy(static_cast<void*>(all.data()), out.data_ptr(), out.nbytes());
    return all;
  }

  bool all_are_good() {
    const std::vector<std::int64_t> good = gather<std::int64_t>(is_good_ ? 1 : 0);
    return std::all_of(good.begin(), good.end(), [](std::int64_t each) { return each == 1; });
  }

  int ranks() const { return static_cast<int>(hosts_[static_cast<std::size_t>(host_index_)].size()); }
  // The introduction of a rank of this host.
  const Introduction& of_place(int place) const {
    const int rank = hosts_[static_cast<std::size_t>(host_index_)][static_cast<std::size_t>(place)];
    return all_[static_cast<std::size_t>(rank)];
  }

  Patience patience() const {
    return {group_->timeout, [this] {
              if (const std::string why = group_->liveness->failure(); !why.empty()) throw std::runtime_error(why);
            }};
  }

  // Gives the memory to the ranks of the host in other processes. Strangers may connect, too, and do anything.
  void accept_all(const HostMapping& mapping) {
    std::vector<Descriptor> of_rank(static_cast<std::size_t>(ranks()));
    std::vector<Descriptor> waited;  // where ranks connect, and connections that have sent nothing yet
    waited.push_back(std::move(listening_));
    int others = 0;
    for (int p = 0; p < ranks(); ++p) others += of_place(p).process != of_place(0).process ? 1 : 0;
    const Patience patience_of_all = patience();
    for (int accepted = 0; accepted < others;) {
      const std::size_t ready = wait_readable(waited, patience_of_all);
      if (ready == 0) {
        waited.push_back(accept_from(waited[0]));
        if (waited.size() > static_cast<std::size_t>(others) + kMostStrangers) waited.erase(waited.begin() + 1);
        continue;
      }
      Descriptor socket = std::exchange(waited[ready], std::move(waited.back()));
      waited.pop_back();
      Greeting greeting;
      const bool is_known = receive_bytes(socket, &greeting, sizeof(greeting)) &&
                            greeting.secret == of_place(0).secret && greeting.rank > 0 && greeting.rank < ranks();
      if (!is_known) continue;
      send_descriptor(socket, mapping.memory());
      of_rank[static_cast<std::size_t>(greeting.rank)] = std::move(socket);
      ++accepted;
    }
    for (std::size_t r = 1; r < of_rank.size(); ++r) sockets_.push_back(std::move(of_rank[r]));
  }

  std::shared_ptr<HostMapping> shared_in_process(const Secret& secret, Descriptor memory) {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    if (std::shared_ptr<HostMapping> known = Mappings::all().find(secret)) {
      known->keep(std::move(memory));
      return known;
    }
    auto mapping = std::make_shared<HostMapping>(std::move(memory), ranks());
    Mappings::all().add(secret, mapping);
    return mapping;
  }

  // Whether the ranks of the host have a processor each. Other ranks of the world may be on the host as well.
  bool may_spin() const {
    cpu_set_t any = {};
    for (int p = 0; p < ranks(); ++p) CPU_OR(&any, &any, &of_place(p).processors);
    return CPU_COUNT(&any) >= (group_->size() == group_->world_size ? ranks() : group_->world_size);
  }

  const GroupPtr& group_;
  bool is_good_ = true;
  Descriptor listening_;
  std::vector<Descriptor> sockets_;
  std::vector<Introduction> all_;
  RanksOfHosts hosts_;
  int host_index_ = 0, place_ = 0;
  std::unique_ptr<Host> host_;
};

// Connects the ranks with one place on each host.
BackendPtr connect_rail(const GroupPtr& group, int place, int host, int hosts) {
  const BackendOptions options{.store = with_prefix(fmt::format("rail/{}", place), group->store),
                               .rank = host,
                               .size = hosts,
                               .timeout = group->timeout};
  BackendPtr rail;
  const Call call = group->next_call(kConnect, /*is_counted=*/false);
  group->guard(call, group->timeout, [&] {
    rail = run_unless([&] { return group->liveness->failure(); }, group->timeout,
                      [options] { return make_gloo(options).backend; });
  });
  return rail;
}

}  // namespace

void use_host_memory(const GroupPtr& group) {
  Connecting connecting(group);
  std::unique_ptr<Host> host = connecting.run();
  if (host == nullptr) return;
  Transport transport;
  transport.name = "host";
  transport.is_complete = true;
  if (const auto hosts = static_cast<int>(connecting.hosts().size()); hosts == 1) {
    transport.backend = c10::make_intrusive<HostBackend>(std::move(host), group->engines);
  } else {
    BackendPtr rail = connect_rail(group, connecting.place(), connecting.host_index(), hosts);
    transport.backend =
        c10::make_intrusive<HostsBackend>(group->rank, connecting.hosts(), std::move(host), std::move(rail),
                                          group->transports.messages.backend, group->engines);
  }
  group->transports.use_on_cpu(transport);
}

}  // namespace tessera::comm
