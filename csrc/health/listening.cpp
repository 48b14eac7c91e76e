#include "listening.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

namespace ddpx::health {
namespace {

int error_of_connecting(const addrinfo& address, std::chrono::milliseconds timeout) {
  const int fd = socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    return errno;
  }
  const timeval limit{timeout.count() / 1000, timeout.count() % 1000 * 1000};
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);  // of connect(), too
  const int error = connect(fd, address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
  close(fd);
  return error;
}

}  // namespace

bool refuses_connections(
    const std::string& host, uint16_t port, std::chrono::milliseconds timeout) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    return false;
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, freeaddrinfo);
  bool refused = false;
  for (const auto* address = found; address != nullptr; address = address->ai_next) {
    const int error = error_of_connecting(*address, timeout);
    if (error == 0 || error == EINPROGRESS) {
      return false;
    }
    refused = refused || error == ECONNREFUSED;  // others: it may have no such address at all
  }
  return refused;
}

}  // namespace ddpx::health
