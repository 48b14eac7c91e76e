// Private connections between processes of one user. Ranks pass memory files through them.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../os/unique_fd.h"

namespace ddpx::shm {

using Clock = std::chrono::steady_clock;

struct Message {
  std::string bytes;
  os::UniqueFd fd;  // empty if the message carried no descriptor
  bool fd_lost = false;

  // Throws kSystem if a descriptor was lost, since this process has too many open files.
  os::UniqueFd take_fd();
};

// One end of a connection that keeps message boundaries. One thread may send while another thread
// receives.
class Connection {
 public:
  explicit Connection(os::UniqueFd fd) : fd_(std::move(fd)) {}

  // Returns false if the peer is gone. The kernel limits the descriptors that all processes of a
  // user have sent and not yet received (RLIMIT_NOFILE). At the limit, `send` calls `while_full`
  // and tries again. `while_full` must receive messages, since peers may be at the limit, too. It
  // throws to end the attempts.
  bool send(
      const std::string& bytes,
      int fd_to_pass = -1,
      const std::function<void()>& while_full = {}) const;

  // The next message. Returns nullopt if no message arrived by the deadline, or the peer is gone.
  std::optional<Message> receive(Clock::time_point deadline) const;

  // Whether the peer has closed its end or died.
  bool hung_up() const;

  // Whether the peer runs as the same user as this process.
  bool same_user() const;

  // Whether the peer's process has ended, as far as this process can see: not if the peer runs in
  // another process namespace.
  bool process_ended() const;

 private:
  os::UniqueFd fd_;
};

// A listening socket in Linux's abstract namespace. The socket has no file, and disappears with its
// last descriptor. Only processes in the same network namespace can reach it. Any of them can: the
// names of all sockets are in /proc/net/unix. A thread therefore accepts connections at once, since
// unaccepted connections of strangers could fill the queue, and closes those of other users.
class Listener {
 public:
  Listener(const std::string& name, int backlog);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // Stops listening. Returns all connections of this user's processes so far. Throws kSystem if a
  // connection could not be accepted.
  std::vector<Connection> stop();

 private:
  void accept_connections() noexcept;

  os::UniqueFd fd_;
  std::vector<Connection> connections_;  // used by the thread until its end
  int error_ = 0;                        // errno at the end of the thread
  std::thread thread_;
};

// A text that is equal for processes that may reach each other through these sockets: of one boot
// of one kernel, one network namespace, and one user. Copies of a virtual machine may have equal
// texts.
std::string abstract_socket_domain();

// Returns nullopt if no process listens on this name in this network namespace, or the process does
// not accept the connection by the deadline.
std::optional<Connection> connect_to(const std::string& name, Clock::time_point deadline);

}  // namespace ddpx::shm
