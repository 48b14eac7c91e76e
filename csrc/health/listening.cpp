#include "listening.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

namespace ddpx::health {
namespace {

using Clock = std::chrono::steady_clock;

int error_of_connecting(const addrinfo& address, Clock::time_point deadline) {
  const int fd = socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    return errno;
  }
  int error = connect(fd, address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd ready{fd, POLLOUT, 0};
    socklen_t size = sizeof error;
    if (poll(&ready, 1, static_cast<int>(std::max<int64_t>(left, 0))) == 1) {
      getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    }
  }
  close(fd);
  return error;
}

}  // namespace

bool refuses_connections(
    const std::string& host, uint16_t port, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    return false;
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, freeaddrinfo);
  bool refused = false;
  for (const auto* address = found; address != nullptr; address = address->ai_next) {
    const int error = error_of_connecting(*address, deadline);
    if (error == 0 || error == EINPROGRESS) {
      return false;
    }
    refused = refused || error == ECONNREFUSED;  // others: it may have no such address at all
  }
  return refused;
}

}  // namespace ddpx::health
