// Who listens.
#include "health/listening.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <string>

namespace ddpx::health {
namespace {

PortState state_of(const std::string& host, uint16_t port) {
  return state_of_port(host, port, std::chrono::milliseconds(500));
}

TEST(ListeningTest, OnlyWhoHasEndedRefuses) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* any = reinterpret_cast<sockaddr*>(&address);
  socklen_t size = sizeof address;
  ASSERT_EQ(bind(fd, any, size), 0);
  ASSERT_EQ(listen(fd, 1), 0);
  ASSERT_EQ(getsockname(fd, any, &size), 0);
  const auto port = ntohs(address.sin_port);
  EXPECT_EQ(state_of("127.0.0.1", port), PortState::kOpen);
  EXPECT_EQ(state_of("127.0.0.1", port), PortState::kOpen);
  EXPECT_FALSE(is_lost(PortState::kOpen));
  EXPECT_EQ(state_of("127.0.0.1", port), PortState::kSilent) << "two connections wait already";
  close(fd);
  EXPECT_EQ(state_of("127.0.0.1", port), PortState::kRefused);
  EXPECT_EQ(state_of("no.such.host.invalid", 1), PortState::kUnknown);
}

// An address of this machine that is not the loopback. Empty if there is none.
std::string own_address() {
  ifaddrs* all = nullptr;
  std::string found;
  if (getifaddrs(&all) == 0) {
    for (const auto* each = all; each != nullptr; each = each->ifa_next) {
      const bool is_inet = each->ifa_addr != nullptr && each->ifa_addr->sa_family == AF_INET;
      if (is_inet && (each->ifa_flags & IFF_LOOPBACK) == 0 && (each->ifa_flags & IFF_UP) != 0) {
        std::array<char, INET_ADDRSTRLEN> text{};
        const auto* inet = reinterpret_cast<const sockaddr_in*>(each->ifa_addr);
        found = inet_ntop(AF_INET, &inet->sin_addr, text.data(), text.size());
      }
    }
    freeifaddrs(all);
  }
  return found;
}

TEST(ListeningTest, AProcessListensOnTheMachineOfTheStoreOnly) {
  EXPECT_EQ(listen_if_local("127.0.0.1"), 0) << "each machine has this address";
  EXPECT_EQ(listen_if_local("192.0.2.1"), 0) << "an address of no machine";
  EXPECT_EQ(listen_if_local("no.such.host.invalid"), 0);
  const auto own = own_address();
  if (own.empty()) {
    GTEST_SKIP() << "this machine has no address but the loopback";
  }
  const auto port = listen_if_local(own);
  ASSERT_NE(port, 0);
  EXPECT_EQ(listen_if_local(own), port);
  EXPECT_EQ(state_of(own, port), PortState::kOpen);
  EXPECT_EQ(state_of("127.0.0.1", port), PortState::kOpen) << "the name may have this address";
  const auto child = fork();
  if (child == 0) {
    const auto port_of_child = listen_if_local(own);
    _exit(port_of_child != 0 && port_of_child != port ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "the child listens at the port of its parent";
}

}  // namespace
}  // namespace ddpx::health
