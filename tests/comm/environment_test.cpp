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

void refuse(const Variables& variables, const std::string& what) {
  EXPECT_ERROR(options_from(variables), ErrorCode::invalid_argument, what);
}

// Returns `variables` with `others` added or in place of those of the same name.
Variables with(Variables variables, const Variables& others) {
  for (const auto& [name, value] : others) variables[name] = value;
  return variables;
}

const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                            {"PMIX_NAMESPACE", "prterun-host-17@1"}};

TEST(EnvironmentTest, JobsOfMpirunOnOneHostHavePortsOfTheirOwn) {
  const auto port = [](const Variables& others) { return options_from(with(kOpenMpi, others)).master_port; };
  EXPECT_EQ(port({}), port({{"OMPI_COMM_WORLD_RANK", "0"}}));
  EXPECT_NE(port({}), port({{"PMIX_NAMESPACE", "prterun-host-18@1"}}));
  EXPECT_GE(port({}), 20000);
  EXPECT_LT(port({}), 30000);
  EXPECT_EQ(port({{"MASTER_PORT", "1234"}}), 1234);
}

TEST(EnvironmentTest, MpirunOnSeveralHostsNeedsTheAddressOfRankZero) {
  const Variables several = with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  refuse(several, "MASTER_ADDR is not set, and 2 of 4 ranks are on this host (OMPI_COMM_WORLD_LOCAL_SIZE)");
  EXPECT_EQ(options_from(with(several, {{"MASTER_ADDR", "host0"}})).master_addr, "host0");
  refuse({{"PMI_RANK", "0"}, {"PMI_SIZE", "4"}, {"MPI_LOCALNRANKS", "3"}}, "3 of 4 ranks are on this host");
}

TEST(EnvironmentTest, MpirunInAJobOfSlurmDoesNotTakeItsHosts) {
  // mpirun starts its own daemons with srun, whose variables its ranks inherit.
  const Variables daemon = {
      {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}, {"SLURM_STEP_NODELIST", "node2"}, {"SLURM_JOB_ID", "7"}};
  const InitOptions options = options_from(with(kOpenMpi, daemon));
  expect(options, 1, 4, "127.0.0.1", options_from(kOpenMpi).master_port);
}

// What srun sets for task 5 of 6 on four hosts, as far as it matters.
const Variables kSrun = {{"SLURM_PROCID", "5"},
                         {"SLURM_NTASKS", "6"},
                         {"SLURM_STEP_NUM_TASKS", "6"},
                         {"SLURM_LOCALID", "0"},
                         {"SLURM_NODEID", "3"},
                         {"SLURM_NNODES", "4"},
                         {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.99"},
                         {"SLURM_JOB_NODELIST", "login,node[01-04]"},
                         {"SLURM_STEP_NODELIST", "node[01-04]"},
                         {"SLURM_JOB_ID", "4711"},
                         {"SLURM_STEP_ID", "0"}};

TEST(EnvironmentTest, SrunGivesRankAddressAndPort) {
  const InitOptions options = options_from(kSrun);
  expect(options, 5, 6, "node01", options.master_port);
  const auto port = [](const Variables& others) { return options_from(with(kSrun, others)).master_port; };
  EXPECT_EQ(port({}), port({{"SLURM_PROCID", "0"}, {"SLURM_NODEID", "0"}}));
  EXPECT_NE(port({}), port({{"SLURM_JOB_ID", "4712"}}));
  EXPECT_NE(port({}), port({{"SLURM_STEP_ID", "1"}}));
  expect(options_from(with(kSrun, {{"MASTER_ADDR", "other"}, {"MASTER_PORT", "1234"}})), 5, 6, "other", 1234);
}

TEST(EnvironmentTest, AStepOfSrunMayHaveFewerTasksThanItsJob) {
  const InitOptions options =
      options_from(with(kSrun, {{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "6"}, {"SLURM_STEP_NUM_TASKS", "2"}}));
  expect(options, 1, 2, "node01", options.master_port);
}

TEST(EnvironmentTest, ABatchScriptIsNoRankOfItsJob) {
  const Variables script = {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "7"}};
  refuse(script, "SLURM_NTASKS is 4 and SLURM_STEP_ID is not set, expected ranks that srun started");
  expect(options_from(with(script, {{"SLURM_NTASKS", "1"}})), 0, 1, "127.0.0.1", 29500);
  expect(options_from(with(script, {{"RANK", "1"}, {"WORLD_SIZE", "2"}})), 1, 2, "127.0.0.1", 29500);
  expect(options_from({{"SLURM_JOB_ID", "7"}}), 0, 1, "127.0.0.1", 29500);
}

TEST(EnvironmentTest, RanksOfMpiThatSrunStartedHaveItsHosts) {
  const Variables pmi2 = with(kSrun, {{"PMI_RANK", "5"}, {"PMI_SIZE", "6"}});
  expect(options_from(pmi2), 5, 6, "node01", options_from(kSrun).master_port);
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
  EXPECT_EQ(master("rack[1-2]node[007,9]-ib"), "rack1node007-ib");
  const auto refuse_hosts = [](const std::string& hosts, const std::string& what) {
    refuse(with(kSrun, {{"SLURM_STEP_NODELIST", hosts}}), what);
  };
  refuse_hosts("node[01-04", "SLURM_STEP_NODELIST is 'node[01-04', in which a ']' is missing");
  refuse_hosts("node[,2]", "in which a number is missing");
  refuse_hosts("", "which begins with no host");
}

TEST(EnvironmentTest, TorchrunComesFirst) {
  expect(options_from({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}}), 1, 2,
         "127.0.0.1", 29500);
}

TEST(EnvironmentTest, TorchrunsAgentKeepsTheStore) {
  const Variables torchrun = {
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "2"}, {"TORCHELASTIC_RUN_ID", "none"}};
  EXPECT_FALSE(options_from(torchrun).agent_store);
  EXPECT_FALSE(options_from(with(torchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})).agent_store);
  EXPECT_TRUE(options_from(with(torchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}})).agent_store);
}

// A shell in which a user exported variables for another start.
TEST(EnvironmentTest, RanksThatContradictTheLauncherAreRefused) {
  const auto by_hand = [](const std::string& rank, const std::string& size) {
    return Variables{{"RANK", rank}, {"WORLD_SIZE", size}};
  };
  refuse(with(kOpenMpi, by_hand("0", "1")), "WORLD_SIZE is 1 and OMPI_COMM_WORLD_SIZE is 4, expected the same number");
  refuse(with(kOpenMpi, by_hand("0", "4")), "RANK is 0 and OMPI_COMM_WORLD_RANK is 1, expected the same rank");
  refuse(with(kSrun, by_hand("0", "1")), "WORLD_SIZE is 1 and SLURM_STEP_NUM_TASKS is 6");
  refuse(with(kSrun, by_hand("4", "6")), "RANK is 4 and SLURM_PROCID is 5");
  expect(options_from(with(kSrun, by_hand("5", "6"))), 5, 6, "node01", options_from(kSrun).master_port);
  // A launcher below srun, which starts several ranks in each of its tasks, or jobs of their own.
  EXPECT_EQ(options_from(with(kSrun, by_hand("11", "12"))).rank, 11);
  EXPECT_EQ(options_from(with(with(kSrun, by_hand("1", "2")), {{"LOCAL_WORLD_SIZE", "2"}})).world_size, 2);
}

TEST(EnvironmentTest, ErrorsNameTheVariable) {
  refuse({{"RANK", "1"}}, "WORLD_SIZE is not set");
  refuse({{"WORLD_SIZE", "2"}}, "RANK is not set");
  refuse({{"RANK", "2"}, {"WORLD_SIZE", "2"}}, "RANK is '2', expected a number from 0 to 1 (WORLD_SIZE is 2)");
  refuse({{"SLURM_PROCID", "4"}, {"SLURM_NTASKS", "4"}},
         "SLURM_PROCID is '4', expected a number from 0 to 3 (SLURM_NTASKS is 4)");
  refuse({{"RANK", "x"}, {"WORLD_SIZE", "2"}}, "RANK is 'x'");
  refuse({{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "WORLD_SIZE is '0', expected a number from 1 to ");
  refuse({{"RANK", "0"}, {"WORLD_SIZE", "99999999999"}}, "WORLD_SIZE is '99999999999'");
  refuse({{"MASTER_PORT", "65536"}}, "MASTER_PORT is '65536', expected a number from 1 to 65535");
  refuse({{"MASTER_PORT", "12a"}}, "MASTER_PORT is '12a'");
  refuse({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", ""}},
         "MASTER_ADDR is '', expected the address of rank 0's host");
  expect(options_from({{"MASTER_ADDR", ""}}), 0, 1, "", 29500);  // one rank needs no address
}

}  // namespace
}  // namespace tessera
