#include <gtest/gtest.h>

#include <map>
#include <string>

#include "support/error_matchers.h"
#include "tessera/comm/init.h"

namespace tessera {
namespace {

using Variables = std::map<std::string, std::string>;

InitOptions options_from(const Variables& variables) {
  return options_from_environment([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

void expect(const InitOptions& options, int rank, int world_size, const std::string& address, int port) {
  EXPECT_EQ(options.rank, rank);
  EXPECT_EQ(options.world_size, world_size);
  EXPECT_EQ(options.master_addr, address);
  EXPECT_EQ(options.master_port, port);
}

TEST(EnvironmentTest, WithoutALauncherThereIsOneRank) { expect(options_from({}), 0, 1, "127.0.0.1", 29500); }

TEST(EnvironmentTest, Torchrun) {
  expect(options_from({{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"MASTER_ADDR", "node1"}, {"MASTER_PORT", "1234"}}), 3, 8,
         "node1", 1234);
}

TEST(EnvironmentTest, Mpirun) {
  expect(options_from({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}}), 1, 2, "127.0.0.1", 29500);
  expect(options_from({{"PMI_RANK", "0"}, {"PMI_SIZE", "4"}, {"MASTER_ADDR", "10.0.0.1"}}), 0, 4, "10.0.0.1", 29500);
}

TEST(EnvironmentTest, SrunNamesTheFirstHost) {
  const auto master = [](const std::string& hosts) {
    return options_from({{"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "6"}, {"SLURM_STEP_NODELIST", hosts}}).master_addr;
  };
  EXPECT_EQ(master("login"), "login");
  EXPECT_EQ(master("a1,b[2-3]"), "a1");
  EXPECT_EQ(master("node[07-12,20],login"), "node07");
  EXPECT_EQ(master("node[3,20]"), "node3");
  EXPECT_EQ(master("rack[1-2].example.org,other"), "rack1.example.org");
}

TEST(EnvironmentTest, TorchrunComesFirst) {
  expect(options_from({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}}), 1, 2,
         "127.0.0.1", 29500);
}

TEST(EnvironmentTest, ErrorsNameTheVariable) {
  const auto refuse = [](const Variables& variables, const std::string& what) {
    EXPECT_ERROR(options_from(variables), ErrorCode::invalid_argument, what);
  };
  refuse({{"RANK", "1"}}, "WORLD_SIZE is not set");
  refuse({{"WORLD_SIZE", "2"}}, "RANK is not set");
  refuse({{"RANK", "2"}, {"WORLD_SIZE", "2"}}, "RANK is '2', expected a number from 0 to 1");
  refuse({{"RANK", "x"}, {"WORLD_SIZE", "2"}}, "RANK is 'x'");
  refuse({{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "WORLD_SIZE is '0', expected a number from 1 to ");
  refuse({{"RANK", "0"}, {"WORLD_SIZE", "99999999999"}}, "WORLD_SIZE is '99999999999'");
  refuse({{"MASTER_PORT", "65536"}}, "MASTER_PORT is '65536', expected a number from 1 to 65535");
  refuse({{"MASTER_PORT", "12a"}}, "MASTER_PORT is '12a'");
}

}  // namespace
}  // namespace tessera
