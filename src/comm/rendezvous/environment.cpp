// The environment variables of launchers.

#include <charconv>
#include <cstdlib>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/comm/init.h"

namespace tessera {

namespace {

struct Launcher {
  const char* rank;
  const char* world_size;
};
constexpr Launcher kLaunchers[] = {
    {"RANK", "WORLD_SIZE"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    {"PMI_RANK", "PMI_SIZE"},
    {"SLURM_PROCID", "SLURM_NTASKS"},
};

class Variables {
 public:
  explicit Variables(const Environment& environment) : environment_(environment) {}

  const char* find(const char* name) const { return environment_(name); }

  int number(const char* name, int least, int most) const {
    const char* text = find(name);
    if (text == nullptr)
      fail(ErrorCode::invalid_argument, "init process group: {} is not set, expected a number from {} to {}", name,
           least, most);
    const std::string_view digits(text);
    int value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || end != digits.data() + digits.size() || value < least || value > most) {
      fail(ErrorCode::invalid_argument, "init process group: {} is '{}', expected a number from {} to {}", name,
           printable(digits), least, most);
    }
    return value;
  }

 private:
  const Environment& environment_;
};

// Returns the first host of a list such as "node[07-12,20],login": "node07".
std::string first_host(std::string_view list) {
  const std::size_t bracket = list.find('[');
  const std::size_t comma = list.find(',');
  if (bracket == std::string_view::npos || comma < bracket) return std::string(list.substr(0, comma));
  const std::string_view ranges = list.substr(bracket + 1, list.find(']', bracket) - bracket - 1);
  const std::size_t close = list.find(']', bracket);
  std::string_view suffix = close == std::string_view::npos ? std::string_view() : list.substr(close + 1);
  suffix = suffix.substr(0, suffix.find(','));
  return std::string(list.substr(0, bracket)) + std::string(ranges.substr(0, ranges.find_first_of(",-"))) +
         std::string(suffix);
}

}  // namespace

InitOptions options_from_environment(const Environment& environment) {
  const Variables variables(environment);
  InitOptions options;
  for (const Launcher& launcher : kLaunchers) {
    if (variables.find(launcher.rank) == nullptr && variables.find(launcher.world_size) == nullptr) continue;
    options.world_size = variables.number(launcher.world_size, 1, std::numeric_limits<int>::max());
    options.rank = variables.number(launcher.rank, 0, options.world_size - 1);
    break;
  }
  if (const char* address = variables.find("MASTER_ADDR")) {
    options.master_addr = address;
  } else if (const char* hosts = variables.find("SLURM_STEP_NODELIST")) {
    options.master_addr = first_host(hosts);
  }
  if (variables.find("MASTER_PORT") != nullptr) {
    options.master_port = static_cast<std::uint16_t>(variables.number("MASTER_PORT", 1, 65535));
  }
  return options;
}

InitOptions options_from_environment() {
  return options_from_environment([](const char* name) { return std::getenv(name); });
}

}  // namespace tessera
