#include "comm/host/connect.h"

#include <ATen/ops/empty.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <utility>

#include "comm/exceptions.h"
#include "comm/host/backend.h"
#include "comm/host/place.h"

namespace tessera::comm {

namespace {

constexpr char kConnect[] = "the connection through shared memory";

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

// The steps of one rank. Each may fail on a rank alone, so the ranks agree after it.
class Connecting {
 public:
  explicit Connecting(const GroupPtr& group) : group_(group) {}

  std::unique_ptr<Host> run() {
    if (group_->size() == 1 || group_->size() > HostMapping::kMostRanks) return nullptr;
    const bool is_first = group_->rank == 0;
    Introduction own;
    own.process = process_number();
    ::sched_getaffinity(0, sizeof(own.processors), &own.processors);
    attempt([&] {
      const std::string place = host_place("net", "TESSERA_HOST_MEMORY");
      if (place.size() < sizeof(own.place)) std::memcpy(own.place, place.data(), place.size());
      if (!is_first) return;
      own.name = random_secret();
      own.secret = random_secret();
      listening_ = listen_at(socket_name(own.name));
    });
    if (!is_good_) own.place[0] = '\0';
    const std::vector<Introduction> all = gather(own);
    for (const Introduction& rank : all) {
      if (rank.place[0] == '\0' || std::strcmp(rank.place, all[0].place) != 0) return nullptr;
    }
    std::shared_ptr<HostMapping> mapping;
    attempt([&] {
      if (is_first) {
        mapping =
            std::make_shared<HostMapping>(make_shared_memory(HostMapping::size_bytes(group_->size())), group_->size());
        Mappings::all().add(own.secret, mapping);
      } else if (all[0].process != own.process) {
        sockets_.push_back(connect_to(socket_name(all[0].name)));
      }
    });
    if (!all_are_good()) return nullptr;
    attempt([&] {
      if (is_first) {
        accept_all(all, *mapping);
      } else if (all[0].process == own.process) {
        mapping = Mappings::all().find(all[0].secret);
      } else {
        const Greeting greeting{all[0].secret, group_->rank};
        send_bytes(sockets_[0], &greeting, sizeof(greeting));
        // Threads of a process that is not rank 0's use one mapping, too.
        Descriptor memory = receive_descriptor(sockets_[0], group_->timeout);
        mapping = shared_in_process(all[0].secret, std::move(memory));
      }
      if (mapping != nullptr) {
        host_ = std::make_unique<Host>(mapping, group_->rank, group_->size(), std::move(sockets_), may_spin(all));
      }
    });
    is_good_ = is_good_ && host_ != nullptr;
    if (!all_are_good()) return nullptr;
    return std::move(host_);
  }

 private:
  void attempt(const std::function<void()>& step) {
    if (!is_good_) return;
    try {
      step();
    } catch (const std::exception&) {  // the group stays on c10d
      is_good_ = false;
    }
  }

  template <typename T>
  std::vector<T> gather(const T& own) {
    const auto size_bytes = static_cast<std::int64_t>(sizeof(T));
    const at::Tensor in = at::empty({size_bytes}, at::kByte), out = at::empty({group_->size() * size_bytes}, at::kByte);
    std::memcpy(in.data_ptr(), &own, sizeof(T));
    start_all_gather(group_, group_->transports.control, kConnect, out, in).wait();
    std::vector<T> all(static_cast<std::size_t>(group_->size()));
    std::memcpy(static_cast<void*>(all.data()), out.data_ptr(), out.nbytes());
    return all;
  }

  bool all_are_good() {
    const std::vector<std::int64_t> good = gather<std::int64_t>(is_good_ ? 1 : 0);
    return std::all_of(good.begin(), good.end(), [](std::int64_t each) { return each == 1; });
  }

  // Gives the memory to the ranks in other processes.
  void accept_all(const std::vector<Introduction>& all, const HostMapping& mapping) {
    std::vector<Descriptor> of_rank(all.size());
    const auto others =
        std::count_if(all.begin(), all.end(), [&](const Introduction& rank) { return rank.process != all[0].process; });
    for (std::ptrdiff_t accepted = 0; accepted < others;) {
      Descriptor socket = accept_from(listening_, group_->timeout);
      Greeting greeting;
      receive_bytes(socket, &greeting, sizeof(greeting), group_->timeout);
      const bool is_known = greeting.secret == all[0].secret && greeting.rank > 0 && greeting.rank < group_->size();
      if (!is_known) continue;  // a stranger
      send_descriptor(socket, mapping.memory());
      of_rank[static_cast<std::size_t>(greeting.rank)] = std::move(socket);
      ++accepted;
    }
    for (std::size_t r = 1; r < of_rank.size(); ++r) sockets_.push_back(std::move(of_rank[r]));
  }

  std::shared_ptr<HostMapping> shared_in_process(const Secret& secret, Descriptor memory) {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    if (std::shared_ptr<HostMapping> known = Mappings::all().find(secret)) return known;
    auto mapping = std::make_shared<HostMapping>(std::move(memory), group_->size());
    Mappings::all().add(secret, mapping);
    return mapping;
  }

  // Whether the ranks of the host have a processor each. Other ranks of the world may be on the host as well.
  bool may_spin(const std::vector<Introduction>& all) const {
    cpu_set_t any = {};
    for (const Introduction& rank : all) CPU_OR(&any, &any, &rank.processors);
    return CPU_COUNT(&any) >= group_->world_size;
  }

  const GroupPtr& group_;
  bool is_good_ = true;
  Descriptor listening_;
  std::vector<Descriptor> sockets_;
  std::unique_ptr<Host> host_;
};

}  // namespace

void use_host_memory(const GroupPtr& group) {
  std::unique_ptr<Host> host = Connecting(group).run();
  if (host == nullptr) return;
  Transport transport;
  transport.name = "host";
  transport.backend = c10::make_intrusive<HostBackend>(std::move(host), group->engines);
  transport.is_complete = true;
  group->transports.use_on_cpu(transport);
}

}  // namespace tessera::comm
