// Who refuses connections.
#include "health/listening.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace ddpx::health {
namespace {

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
  const auto refuses = [port = ntohs(address.sin_port)] {
    return refuses_connections("127.0.0.1", port, std::chrono::milliseconds(500));
  };
  for (int connection = 0; connection < 3; ++connection) {  // though nobody accepts any
    EXPECT_FALSE(refuses());
  }
  close(fd);
  EXPECT_TRUE(refuses());
  EXPECT_FALSE(refuses_connections("no.such.host.invalid", 1, std::chrono::milliseconds(500)));
}

}  // namespace
}  // namespace ddpx::health
