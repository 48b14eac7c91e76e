// Runs a function once per rank, in threads of this process or in forked processes.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "channels.h"
#include "shm/error.h"
#include "shm/group.h"

namespace ddpx::shm {

using Seconds = std::chrono::duration<double>;

constexpr auto kInTime = std::chrono::seconds(10);

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A rank of a test.
struct Rank {
  Group& group;
  int rank;
  int size;
  std::shared_ptr<Arena> arena;
};

inline GroupOptions test_options() {
  GroupOptions options;
  options.timeout = std::chrono::seconds(60);
  options.rendezvous_timeout = std::chrono::seconds(60);
  // Small sizes, so that a buffer of a few KiB has many pieces.
  options.sizes = {1024, 4096};
  return options;
}

// Runs each rank in a thread. Rethrows the first error after all threads have ended.
inline void run_threads_over(
    Channel& channel,
    int size,
    const std::function<void(const Rank&)>& work,
    const std::function<GroupOptions(int)>& options_of = [](int) { return test_options(); }) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto arena = std::make_shared<Arena>();
        Group group(channel, rank, size, options_of(rank), arena);
        work({group, rank, size, arena});
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  for (const auto& error : errors) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
}

inline void run_threads(
    int size,
    const std::function<void(const Rank&)>& work,
    const GroupOptions& options = test_options()) {
  MemoryChannel channel;
  run_threads_over(channel, size, work, [&](int) { return options; });
}

// The outcome of a process.
struct Outcome {
  bool killed = false;
  std::string text;  // the text that `work` returned, or the error that it threw
};

// Runs each rank in a forked process. The child runs `prepare`, joins the group, runs `work`, and
// sends its result to the parent.
inline std::vector<Outcome> run_processes(
    int size,
    const std::function<std::string(const Rank&)>& work,
    const GroupOptions& options = test_options(),
    const std::function<void()>& prepare = [] {}) {
  const TemporaryDirectory directory;
  std::filesystem::permissions(directory.path(), std::filesystem::perms::all);
  struct Child {
    pid_t pid;
    int pipe;
  };
  std::vector<Child> children;
  for (int rank = 0; rank < size; ++rank) {
    int ends[2];
    if (pipe(ends) != 0) {
      throw std::runtime_error("pipe failed");
    }
    const auto pid = fork();
    if (pid == 0) {
      std::string text;
      try {
        prepare();
        FileChannel channel(directory.path());
        const auto arena = std::make_shared<Arena>();
        Group group(channel, rank, size, options, arena);
        text = work({group, rank, size, arena});
      } catch (const std::exception& error) {
        text = error.what();
      }
      const auto written = write(ends[1], text.data(), text.size());
      _exit(written == static_cast<ssize_t>(text.size()) ? 0 : 1);
    }
    close(ends[1]);
    children.push_back({pid, ends[0]});
  }
  std::vector<Outcome> outcomes;
  for (const auto& child : children) {
    Outcome outcome;
    char buffer[4096];
    for (ssize_t count = 0; (count = read(child.pipe, buffer, sizeof(buffer))) > 0;) {
      outcome.text.append(buffer, static_cast<std::size_t>(count));
    }
    close(child.pipe);
    int status = 0;
    waitpid(child.pid, &status, 0);
    outcome.killed = WIFSIGNALED(status);
    outcomes.push_back(std::move(outcome));
  }
  return outcomes;
}

}  // namespace ddpx::shm
