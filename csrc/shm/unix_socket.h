// Private connections between processes of one user, over which memory is handed.
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
  UniqueFd fd;  // none, if none came along
};

// One end of a connection that keeps message boundaries. Sending and receiving may happen on two
// threads at a time.
class Connection {
 public:
  explicit Connection(UniqueFd fd) : fd_(std::move(fd)) {}

  // Does not block: messages are few and short. Throws kSystem, also if the peer is gone.
  void send(const std::string& bytes, int fd_to_hand_over = -1) const;

  // The next message; nothing if none came by the deadline or the peer is gone.
  std::optional<Message> receive(Clock::time_point deadline) const;

  // Whether the peer has closed its end, or died.
  bool hung_up() const;

  // Whether the peer runs as the same user as this process.
  bool same_user() const;

  // A descriptor that becomes readable when the peer's process ends; none where the kernel or a
  // process namespace does not let us have one, or the peer is this process.
  UniqueFd watch_process() const;

 private:
  UniqueFd fd_;
};

// A listening socket in Linux's abstract namespace: no file, gone with the last descriptor. Only
// processes in the same network namespace can reach it.
class Listener {
 public:
  Listener(const std::string& name, int backlog);

  std::optional<Connection> accept(Clock::time_point deadline) const;

 private:
  UniqueFd fd_;
};

// Nothing if nobody listens under this name here.
std::optional<Connection> connect_to(const std::string& name);

}  // namespace ddpx::shm
