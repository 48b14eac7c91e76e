// Private connections between processes of one user. Ranks pass memory files through them.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>

#include "unique_fd.h"

namespace ddpx::shm {

using Clock = std::chrono::steady_clock;

struct Message {
  std::string bytes;
  UniqueFd fd;  // empty if the message carried no descriptor
};

// One end of a connection that keeps message boundaries. One thread may send while another thread
// receives.
class Connection {
 public:
  explicit Connection(UniqueFd fd) : fd_(std::move(fd)) {}

  // Does not block, since messages are few and short. Throws kSystem, also if the peer is gone.
  void send(const std::string& bytes, int fd_to_pass = -1) const;

  // The next message. Returns nullopt if no message arrived by the deadline, or the peer is gone.
  std::optional<Message> receive(Clock::time_point deadline) const;

  // Whether the peer has closed its end or died.
  bool hung_up() const;

  // Whether the peer runs as the same user as this process.
  bool same_user() const;

  // A pidfd, which becomes readable when the peer's process ends. Empty if the kernel or a process
  // namespace does not allow a pidfd, or if the peer is this process.
  UniqueFd watch_process() const;

 private:
  UniqueFd fd_;
};

// A listening socket in Linux's abstract namespace. The socket has no file, and disappears with its
// last descriptor. Only processes in the same network namespace can reach it.
class Listener {
 public:
  Listener(const std::string& name, int backlog);

  std::optional<Connection> accept(Clock::time_point deadline) const;

 private:
  UniqueFd fd_;
};

// Returns nullopt if no process listens on this name in this network namespace.
std::optional<Connection> connect_to(const std::string& name);

}  // namespace ddpx::shm
