#include "listening.h"

#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <atomic>
#include <cerrno>
#include <memory>

#include "../shm/unique_fd.h"

namespace ddpx::health {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses resolve(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  return {error == 0 ? found : nullptr, freeaddrinfo};
}

shm::UniqueFd new_socket(const addrinfo& address) {
  return shm::UniqueFd(socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
}

int error_of_connecting(const addrinfo& address, std::chrono::milliseconds timeout) {
  const auto fd = new_socket(address);
  const timeval limit{timeout.count() / 1000, timeout.count() % 1000 * 1000};
  setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);  // of connect(), too
  return connect(fd.get(), address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
}

// Other machines have a loopback of their own.
bool is_loopback(const addrinfo& address) {
  if (address.ai_family == AF_INET) {
    const auto* inet = reinterpret_cast<const sockaddr_in*>(address.ai_addr);
    return ntohl(inet->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  }
  const auto* inet6 = reinterpret_cast<const sockaddr_in6*>(address.ai_addr);
  return address.ai_family != AF_INET6 || IN6_IS_ADDR_LOOPBACK(&inet6->sin6_addr) != 0;
}

uint16_t port_of(int fd) {
  sockaddr_in6 name{};
  socklen_t size = sizeof name;
  const bool known = getsockname(fd, reinterpret_cast<sockaddr*>(&name), &size) == 0;
  return known ? ntohs(name.sin6_port) : 0;  // `sin_port` has the same place
}

std::atomic<int> listening_fd{-1};  // -1: this process does not listen

void close_in_child() {
  const shm::UniqueFd closed(listening_fd.exchange(-1));
}

// At all addresses of the family: the host's name may have another address on other machines.
void listen_like(const addrinfo& address) {
  static const int registered = pthread_atfork(nullptr, nullptr, close_in_child);
  (void)registered;
  sockaddr_storage any{};
  any.ss_family = static_cast<sa_family_t>(address.ai_family);
  auto fd = new_socket(address);
  const bool bound = bind(fd.get(), reinterpret_cast<sockaddr*>(&any), address.ai_addrlen) == 0;
  int none = -1;
  if (bound && listen(fd.get(), SOMAXCONN) == 0 &&
      listening_fd.compare_exchange_strong(none, fd.get())) {
    fd.release();  // the process keeps it
  }
}

}  // namespace

PortState state_of_port(const std::string& host, uint16_t port, std::chrono::milliseconds timeout) {
  const auto addresses = resolve(host, port);
  bool refused = false;
  bool silent = false;
  bool unknown = !addresses;
  for (const auto* address = addresses.get(); address != nullptr; address = address->ai_next) {
    switch (error_of_connecting(*address, timeout)) {
      case 0:
        return PortState::kOpen;
      case ECONNREFUSED:
        refused = true;
        break;
      case EINPROGRESS:
        silent = true;
        break;
      case EHOSTUNREACH:
      case ENETUNREACH:
        break;  // the machine may have no such address at all
      default:
        unknown = true;
    }
  }
  return unknown || (refused && silent) ? PortState::kUnknown
         : refused                      ? PortState::kRefused
                                        : PortState::kSilent;
}

uint16_t listen_if_local(const std::string& host) {
  const auto addresses = resolve(host, 0);
  for (const auto* address = addresses.get(); address != nullptr; address = address->ai_next) {
    const auto fd = new_socket(*address);
    if (is_loopback(*address) || bind(fd.get(), address->ai_addr, address->ai_addrlen) != 0) {
      continue;
    }
    if (listening_fd == -1) {
      listen_like(*address);
    }
    return listening_fd == -1 ? 0 : port_of(listening_fd);
  }
  return 0;
}

}  // namespace ddpx::health
