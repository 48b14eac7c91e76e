#include "unix_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <new>

#include "../os/process.h"
#include "error.h"

namespace ddpx::shm {
namespace {

constexpr std::size_t kMaxMessageBytes = 512;

struct Address {
  sockaddr_un address{};
  socklen_t length = 0;
};

// A leading zero byte puts the name into the abstract namespace.
Address abstract_address(const std::string& name) {
  Address result;
  result.address.sun_family = AF_UNIX;
  const auto length = std::min(name.size(), sizeof(result.address.sun_path) - 1);
  std::memcpy(result.address.sun_path + 1, name.data(), length);
  result.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return result;
}

os::UniqueFd new_socket() {
  os::UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd) {
    throw system_error("socket");
  }
  return fd;
}

// Returns true if one of `events`, or the end of the connection, happens by the deadline.
bool wait_for(int fd, short events, Clock::time_point deadline) {
  while (true) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd entry{fd, events, 0};
    const int count = poll(&entry, 1, static_cast<int>(std::clamp<long long>(left, 0, 3'600'000)));
    if (count > 0) {
      return true;
    }
    if (count < 0 && errno != EINTR) {
      throw system_error("poll");
    }
    if (Clock::now() >= deadline) {
      return false;
    }
  }
}

struct alignas(cmsghdr) ControlBuffer {
  char bytes[CMSG_SPACE(sizeof(int))] = {};
};

std::optional<ucred> credentials(int fd) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    return std::nullopt;
  }
  return peer;
}

}  // namespace

os::UniqueFd Message::take_fd() {
  if (fd_lost) {
    throw Error(
        ErrorKind::kSystem,
        std::string("[ddpx shm] a file descriptor of a local rank could not be received") +
            os::kManyFiles);
  }
  return std::move(fd);
}

bool Connection::send(
    const std::string& bytes, int fd_to_pass, const std::function<void()>& while_full) const {
  iovec data{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  ControlBuffer control;
  if (fd_to_pass >= 0) {
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof(control.bytes);
    auto* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd_to_pass, sizeof(int));
  }
  while (sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EPIPE || errno == ECONNRESET) {
      return false;
    }
    if ((errno == ETOOMANYREFS || errno == EAGAIN) && while_full) {
      while_full();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    } else if (errno != EINTR) {
      throw system_error("sendmsg to a local rank");
    }
  }
  return true;
}

std::optional<Message> Connection::receive(Clock::time_point deadline) const {
  if (!wait_for(fd_.get(), POLLIN, deadline)) {
    return std::nullopt;
  }
  char buffer[kMaxMessageBytes];
  iovec data{buffer, sizeof(buffer)};
  ControlBuffer control;
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof(control.bytes);
  const auto num_bytes = recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (num_bytes <= 0) {
    return std::nullopt;
  }
  Message result{
      std::string(buffer, static_cast<std::size_t>(num_bytes)),
      os::UniqueFd(),
      (message.msg_flags & MSG_CTRUNC) != 0};
  for (auto* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
      result.fd = os::UniqueFd(fd);
    }
  }
  return result;
}

bool Connection::hung_up() const {
  pollfd entry{fd_.get(), 0, 0};
  return poll(&entry, 1, 0) > 0 && (entry.revents & (POLLHUP | POLLERR)) != 0;
}

bool Connection::same_user() const {
  const auto peer = credentials(fd_.get());
  return peer && peer->uid == geteuid();
}

bool Connection::process_ended() const {
  const auto peer = credentials(fd_.get());
  return peer && peer->pid > 0 && peer->pid != getpid() && os::has_ended(peer->pid);
}

Listener::Listener(const std::string& name, int backlog) : fd_(new_socket()) {
  const auto address = abstract_address(name);
  const auto* generic = reinterpret_cast<const sockaddr*>(&address.address);
  if (bind(fd_.get(), generic, address.length) != 0) {
    throw system_error("bind");
  }
  if (listen(fd_.get(), backlog) != 0) {
    throw system_error("listen");
  }
  thread_ = std::thread([this] { accept_connections(); });
}

Listener::~Listener() {
  if (thread_.joinable()) {
    shutdown(fd_.get(), SHUT_RDWR);
    thread_.join();
  }
}

// Body of the thread. After the shutdown, `accept4` returns the connections in the queue, and then
// EINVAL.
void Listener::accept_connections() noexcept {
  try {
    while (true) {
      os::UniqueFd fd(accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (fd) {
        Connection connection(std::move(fd));
        if (connection.same_user()) {
          connections_.push_back(std::move(connection));
        }
      } else if (errno != EINTR && errno != ECONNABORTED) {
        error_ = errno;
        return;
      }
    }
  } catch (const std::bad_alloc&) {
    error_ = ENOMEM;
  }
}

std::vector<Connection> Listener::stop() {
  shutdown(fd_.get(), SHUT_RDWR);
  thread_.join();
  if (error_ != EINVAL) {
    errno = error_;
    throw system_error("accepting the connection of a local rank");
  }
  return std::move(connections_);
}

std::string abstract_socket_domain() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  struct stat network{};
  stat("/proc/self/ns/net", &network);
  return boot + " " + std::to_string(network.st_ino) + " " + std::to_string(geteuid());
}

std::optional<Connection> connect_to(const std::string& name, Clock::time_point deadline) {
  auto fd = new_socket();
  const auto address = abstract_address(name);
  const auto* generic = reinterpret_cast<const sockaddr*>(&address.address);
  do {
    // `connect` waits while the queue of the listener is full. It uses the timeout for sending.
    const auto left =
        std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now()).count();
    timeval timeout{};  // zero would mean no limit
    timeout.tv_sec = static_cast<time_t>(std::max<long long>(left, 1) / 1'000'000);
    timeout.tv_usec = static_cast<suseconds_t>(std::max<long long>(left, 1) % 1'000'000);
    setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
    if (connect(fd.get(), generic, address.length) == 0) {
      return Connection(std::move(fd));
    }
  } while (errno == EINTR);
  return std::nullopt;
}

}  // namespace ddpx::shm
