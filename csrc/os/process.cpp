#include "process.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <sstream>
#include <system_error>
#include <utility>
#include <vector>

#include "error.h"

namespace ddpx::os {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// As above, but throws an Error at the limit of open files.
std::string required_line(const std::string& path) {
  errno = 0;
  auto line = first_line(path);
  if (line.empty() && (errno == EMFILE || errno == ENFILE)) {
    throw system_error("reading " + path);
  }
  return line;
}

struct Stat {
  char state;
  uint64_t start_time;
  std::optional<int> wait_status;  // of a process that has ended
};

std::string path_of_stat(pid_t pid) {
  return "/proc/" + std::to_string(pid) + "/stat";
}

// proc(5): the name, in parentheses, may hold spaces, so fields are counted from behind it.
std::optional<Stat> parse_stat(const std::string& line) {
  std::istringstream rest(line.substr(line.rfind(')') + 1));
  const std::vector<std::string> fields{std::istream_iterator<std::string>(rest), {}};
  constexpr std::size_t kStartTime = 22 - 3;
  constexpr std::size_t kExitCode = 52 - 3;
  if (fields.size() <= kExitCode) {
    return std::nullopt;
  }
  Stat stat{fields.front().front(), std::stoull(fields[kStartTime]), std::nullopt};
  if (stat.state == 'Z' || stat.state == 'X') {
    stat.wait_status = std::stoi(fields[kExitCode]);
  }
  return stat;
}

// nullopt if the process is gone or hidden, and at the limit of open files.
std::optional<Stat> read_stat(pid_t pid) {
  return parse_stat(first_line(path_of_stat(pid)));
}

UniqueFd open_pidfd(pid_t pid) {
  constexpr long kPidfdOpen = 434;  // SYS_pidfd_open, which old headers lack
  return UniqueFd(static_cast<int>(syscall(kPidfdOpen, pid, 0)));
}

// Whether the process behind a pidfd has ended.
bool is_over(const UniqueFd& pidfd) {
  pollfd process{pidfd.get(), POLLIN, 0};
  return poll(&process, 1, 0) > 0;
}

// The status of a process whose parent has read the status. Otherwise, and before Linux 6.15:
// nullopt.
std::optional<int> wait_status_of(int pidfd) {
  struct Info {                        // the kernel's struct pidfd_info, first version
    uint64_t mask = uint64_t{1} << 3;  // PIDFD_INFO_EXIT
    uint64_t cgroup = 0;
    std::array<uint32_t, 11> ids{};
    int32_t exit_code = 0;
  } info;
  static_assert(sizeof(Info) == 64);
  const uint64_t wanted = info.mask;
  const bool answered = ioctl(pidfd, _IOWR(0xFF, 11, Info), &info) == 0;
  return answered && (info.mask & wanted) != 0 ? std::make_optional<int>(info.exit_code)
                                               : std::nullopt;
}

constexpr const char* kAborted =
    " (native code aborted it, and its stderr has the reason; gloo aborts a process if ranks make "
    "different collective calls)";

// `sigabbrev_np` needs glibc 2.32. torch's wheels run with glibc 2.28.
std::string name_of_signal(int signal) {
  constexpr std::pair<int, const char*> kNames[] = {
      {SIGABRT, "SIGABRT"},
      {SIGBUS, "SIGBUS"},
      {SIGFPE, "SIGFPE"},
      {SIGHUP, "SIGHUP"},
      {SIGILL, "SIGILL"},
      {SIGINT, "SIGINT"},
      {SIGKILL, "SIGKILL"},
      {SIGPIPE, "SIGPIPE"},
      {SIGQUIT, "SIGQUIT"},
      {SIGSEGV, "SIGSEGV"},
      {SIGSYS, "SIGSYS"},
      {SIGTERM, "SIGTERM"},
      {SIGTRAP, "SIGTRAP"},
      {SIGUSR1, "SIGUSR1"},
      {SIGUSR2, "SIGUSR2"},
      {SIGXCPU, "SIGXCPU"}};
  for (const auto& [number, name] : kNames) {
    if (number == signal) {
      return name;
    }
  }
  return "signal " + std::to_string(signal);
}

}  // namespace

std::string describe_ending(std::optional<int> wait_status) {
  if (!wait_status) {
    return "died";
  }
  if (WIFSIGNALED(*wait_status)) {
    const int signal = WTERMSIG(*wait_status);
    return "was killed by " + name_of_signal(signal) + (signal == SIGABRT ? kAborted : "");
  }
  return "ended with exit code " + std::to_string(WEXITSTATUS(*wait_status));
}

ProcessId this_process() {
  const auto pid = getpid();
  const auto stat = parse_stat(required_line(path_of_stat(pid)));
  std::error_code ignored;
  const auto machine = required_line("/proc/sys/kernel/random/boot_id") + " " +
                       std::filesystem::read_symlink("/proc/self/ns/pid", ignored).string();
  return ProcessId{
      std::to_string(std::hash<std::string>()(machine)), pid, stat ? stat->start_time : 0};
}

bool has_ended(pid_t pid) {
  const auto fd = open_pidfd(pid);
  return fd ? is_over(fd) : errno == ESRCH;
}

ProcessWatch::ProcessWatch(ProcessId id) : id_(std::move(id)), fd_(open_pidfd(id_.pid)) {
  // /proc may hide processes of other users. Their descriptors show whether they have ended.
  const auto stat = read_stat(id_.pid);
  if (stat && stat->start_time != id_.start_time) {
    fd_ = UniqueFd();  // another process has its number now
  }
}

bool ProcessWatch::ended() const {
  if (fd_) {
    return is_over(fd_);
  }
  if (kill(id_.pid, 0) != 0 && errno == ESRCH) {
    return true;
  }
  const auto stat = read_stat(id_.pid);
  return stat && (stat->start_time != id_.start_time || stat->wait_status);
}

// The kernel has the status of a process in one of two places: before or after its parent has read
// the status.
std::optional<int> ProcessWatch::wait_status() const {
  const auto stat = read_stat(id_.pid);
  if (stat && stat->start_time == id_.start_time && stat->wait_status) {
    return stat->wait_status;
  }
  return fd_ ? wait_status_of(fd_.get()) : std::nullopt;
}

char ProcessWatch::state() const {
  const auto stat = read_stat(id_.pid);
  return stat && stat->start_time == id_.start_time ? stat->state : '\0';
}

}  // namespace ddpx::os
