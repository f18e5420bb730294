// The environment variables of launchers.

#include <array>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/comm/init.h"

namespace tessera {

namespace {

// The variables of a launcher. Where one may be missing, the next of the list is read.
struct Launcher {
  const char* rank;
  std::array<const char*, 2> world_size;
  const char* local_size = nullptr;  // number of ranks on this host
  const char* job = nullptr;         // a name that differs between the jobs of a host
  bool is_slurm = false;
};
constexpr Launcher kByHand = {"RANK", {"WORLD_SIZE"}};
constexpr Launcher kSlurm = {"SLURM_PROCID", {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}, nullptr, nullptr, true};
constexpr Launcher kOthers[] = {
    {"OMPI_COMM_WORLD_RANK", {"OMPI_COMM_WORLD_SIZE"}, "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"},
    {"PMI_RANK", {"PMI_SIZE"}, "MPI_LOCALNRANKS"},
    kSlurm,
};

constexpr int kMost = std::numeric_limits<int>::max();

struct Ranks {
  const Launcher* launcher = nullptr;
  int rank = 0, world_size = 1;
};

class Variables {
 public:
  explicit Variables(Environment environment) : environment_(environment) {}

  const char* find(const char* name) const { return name == nullptr ? nullptr : environment_(name); }

  // `note` explains the range.
  int number(const char* name, int least, int most, const std::string& note = "") const {
    const char* text = find(name);
    if (text == nullptr)
      fail(ErrorCode::invalid_argument, "init process group: {} is not set, expected a number from {} to {}{}", name,
           least, most, note);
    const std::string_view digits(text);
    int value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || end != digits.data() + digits.size() || value < least || value > most) {
      fail(ErrorCode::invalid_argument, "init process group: {} is '{}', expected a number from {} to {}{}", name,
           printable(digits), least, most, note);
    }
    return value;
  }

  const char* name_of_size(const Launcher& launcher) const {
    for (const char* name : launcher.world_size) {
      if (find(name) != nullptr) return name;
    }
    return launcher.world_size[0];
  }

  // Reads the rank and the number of ranks, if one of them is set.
  std::optional<Ranks> ranks(const Launcher& launcher) const {
    const char* size = name_of_size(launcher);
    if (find(launcher.rank) == nullptr && find(size) == nullptr) return std::nullopt;
    const int world_size = number(size, 1, kMost);
    return Ranks{&launcher, number(launcher.rank, 0, world_size - 1, fmt::format(" ({} is {})", size, world_size)),
                 world_size};
  }

 private:
  Environment environment_;
};

// Returns the first host of a list of Slurm such as "node[07-12,20],login": "node07".
std::string first_host(const char* name, std::string_view list) {
  const auto refuse_without = [&](const char* what) {
    fail(ErrorCode::invalid_argument, "init process group: {} is '{}', {}, expected hosts such as node[01-04,7],other",
         name, printable(list), what);
  };
  std::string host;
  for (std::size_t i = 0; i < list.size() && list[i] != ',';) {
    if (list[i] != '[') {
      host += list[i++];
      continue;
    }
    const std::size_t close = list.find(']', i);
    if (close == std::string_view::npos) refuse_without("in which a ']' is missing");
    const std::string_view ranges = list.substr(i + 1, close - i - 1);
    const std::string_view first = ranges.substr(0, ranges.find_first_of(",-"));
    if (first.empty()) refuse_without("in which a number is missing");
    host += first;
    i = close + 1;
  }
  if (host.empty()) refuse_without("which begins with no host");
  return host;
}

// A batch script of Slurm and the shell of salloc have the number of tasks of their job, but are none of them.
bool is_below_srun(const Variables& variables) {
  return variables.find("SLURM_JOB_ID") == nullptr || variables.find("SLURM_STEP_ID") != nullptr ||
         variables.find("SLURM_STEP_NUM_TASKS") != nullptr;
}

// Variables that a user sets for one launcher and forgets under another would start the same rank several times. A
// launcher below another, such as torchrun on each host of srun, has more ranks, or sets LOCAL_WORLD_SIZE.
void check_by_hand(const Variables& variables, const Ranks& by_hand) {
  if (variables.find("LOCAL_WORLD_SIZE") != nullptr) return;
  for (const Launcher& launcher : kOthers) {
    if (launcher.is_slurm && !is_below_srun(variables)) continue;
    const std::optional<Ranks> other = variables.ranks(launcher);
    if (!other) continue;
    if (by_hand.world_size < other->world_size) {
      fail(ErrorCode::invalid_argument,
           "init process group: WORLD_SIZE is {} and {} is {}, expected the same number: unset WORLD_SIZE and RANK",
           by_hand.world_size, variables.name_of_size(launcher), other->world_size);
    }
    if (by_hand.world_size == other->world_size && by_hand.rank != other->rank) {
      fail(ErrorCode::invalid_argument,
           "init process group: RANK is {} and {} is {}, expected the same rank: unset RANK and WORLD_SIZE",
           by_hand.rank, launcher.rank, other->rank);
    }
    return;
  }
}

// Returns the one rank of a job that has no more tasks.
Ranks alone_in_job(const Variables& variables) {
  const char* size = variables.name_of_size(kSlurm);
  const int tasks = variables.find(size) == nullptr ? 1 : variables.number(size, 1, kMost);
  if (tasks == 1) return {};
  fail(ErrorCode::invalid_argument,
       "init process group: {} is {} and SLURM_STEP_ID is not set, expected ranks that srun started: start the program "
       "with srun, or set RANK and WORLD_SIZE",
       size, tasks);
}

Ranks find_ranks(const Variables& variables) {
  if (const std::optional<Ranks> by_hand = variables.ranks(kByHand)) {
    check_by_hand(variables, *by_hand);
    return *by_hand;
  }
  for (const Launcher& launcher : kOthers) {
    if (launcher.is_slurm && !is_below_srun(variables)) return alone_in_job(variables);
    if (const std::optional<Ranks> ranks = variables.ranks(launcher)) return *ranks;
  }
  return {};
}

// Whether srun started exactly these ranks: its list of hosts begins with that of rank 0.
bool is_from_srun(const Variables& variables, const Ranks& ranks) {
  if (variables.find(kSlurm.rank) == nullptr || !is_below_srun(variables)) return false;
  const std::optional<Ranks> srun = variables.ranks(kSlurm);
  return srun && srun->rank == ranks.rank && srun->world_size == ranks.world_size;
}

std::string find_address(const Variables& variables, const Ranks& ranks, bool from_srun) {
  if (const char* address = variables.find("MASTER_ADDR")) {
    if (*address == '\0' && ranks.world_size > 1) {
      fail(ErrorCode::invalid_argument, "init process group: MASTER_ADDR is '', expected the address of rank 0's host");
    }
    return address;
  }
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
    if (const char* hosts = variables.find(name); hosts != nullptr && from_srun) return first_host(name, hosts);
  }
  if (ranks.launcher != nullptr && variables.find(ranks.launcher->local_size) != nullptr) {
    const int here = variables.number(ranks.launcher->local_size, 1, kMost);
    if (here < ranks.world_size) {
      fail(ErrorCode::invalid_argument,
           "init process group: MASTER_ADDR is not set, and {} of {} ranks are on this host ({}), expected all or the "
           "address of rank 0's host in MASTER_ADDR",
           here, ranks.world_size, ranks.launcher->local_size);
    }
  }
  return InitOptions().master_addr;
}

// Returns the same port on all ranks of a job, and mostly another one in other jobs. It is below the ports that Linux
// gives to clients.
std::uint16_t port_of_job(std::string_view job) {
  std::uint32_t hash = 2166136261u;  // FNV-1a
  for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return static_cast<std::uint16_t>(20000 + hash % 10000);
}

std::uint16_t find_port(const Variables& variables, const Ranks& ranks, bool from_srun) {
  if (variables.find("MASTER_PORT") != nullptr)
    return static_cast<std::uint16_t>(variables.number("MASTER_PORT", 1, 65535));
  if (ranks.launcher != nullptr && ranks.launcher->job != nullptr) {
    if (const char* job = variables.find(ranks.launcher->job)) return port_of_job(job);
  }
  if (const char* job = variables.find("SLURM_JOB_ID"); job != nullptr && from_srun) {
    const char* step = variables.find("SLURM_STEP_ID");
    return port_of_job(fmt::format("{}.{}", job, step != nullptr ? step : ""));
  }
  return InitOptions().master_port;
}

}  // namespace

InitOptions options_from_environment(Environment environment) {
  const Variables variables(environment);
  const Ranks ranks = find_ranks(variables);
  const bool from_srun = is_from_srun(variables, ranks);
  InitOptions options;
  options.rank = ranks.rank;
  options.world_size = ranks.world_size;
  options.master_addr = find_address(variables, ranks, from_srun);
  options.master_port = find_port(variables, ranks, from_srun);
  const char* agent_store = variables.find("TORCHELASTIC_USE_AGENT_STORE");
  options.agent_store = ranks.launcher == &kByHand && agent_store != nullptr && agent_store == std::string_view("True");
  return options;
}

InitOptions options_from_environment() {
  return options_from_environment([](const char* name) { return std::getenv(name); });
}

}  // namespace tessera
