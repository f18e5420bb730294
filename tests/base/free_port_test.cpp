#include "tessera/base/internal/free_port.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>

namespace tessera {
namespace {

TEST(FreePortTest, NoOtherSocketIsGivenIt) {
  int first_given = 0;
  std::ifstream("/proc/sys/net/ipv4/ip_local_port_range") >> first_given;
  const bool leaves_ports = first_given >= 10100;  // else any port is as good as another
  std::set<int> ports;
  for (int i = 0; i < 20; ++i) {
    const int port = free_port();
    EXPECT_GE(port, 1024);
    EXPECT_TRUE(port < first_given || !leaves_ports) << port;
    ports.insert(port);
  }
  EXPECT_GT(ports.size(), 10u);
}

}  // namespace
}  // namespace tessera
