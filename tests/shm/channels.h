// Channels for tests and benchmarks, whose ranks are threads or processes.
#pragma once

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "os/unique_fd.h"
#include "shm/channel.h"

namespace ddpx::shm {

// A channel for ranks that are threads of one process.
class MemoryChannel : public Channel {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }

  void append(const std::string& key, const std::string& value) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    values_[key] += value;
  }

  int64_t count_up(const std::string& key) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ++numbers_[key];
  }

  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, timeout, [&] { return values_.count(key) > 0; })) {
      throw std::runtime_error("no rank set " + key);
    }
    return values_[key];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  std::map<std::string, int64_t> numbers_;
};

// A channel for ranks that are processes: one file per key in a directory.
class FileChannel : public Channel {
 public:
  explicit FileChannel(std::filesystem::path directory) : directory_(std::move(directory)) {}

  void set(const std::string& key, const std::string& value) override {
    const auto path = path_of(key);
    const auto draft = path.string() + ".draft";
    std::ofstream(draft, std::ios::binary) << value;
    std::filesystem::rename(draft, path);
  }

  void append(const std::string& key, const std::string& value) override {
    size_after_append(key, value);
  }

  int64_t count_up(const std::string& key) override {
    return size_after_append(key, "x");
  }

  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    const auto path = path_of(key);
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (!std::filesystem::exists(path)) {
      if (std::chrono::steady_clock::now() >= deadline) {
        throw std::runtime_error("no rank set " + key);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }

 private:
  // The kernel appends in one piece, and moves the offset to the end of this piece.
  int64_t size_after_append(const std::string& key, const std::string& value) {
    const os::UniqueFd fd(open(path_of(key).c_str(), O_WRONLY | O_APPEND | O_CREAT, 0666));
    if (write(fd.get(), value.data(), value.size()) != static_cast<ssize_t>(value.size())) {
      throw std::runtime_error("write failed");
    }
    return lseek(fd.get(), 0, SEEK_CUR);
  }

  std::filesystem::path path_of(std::string key) const {
    for (auto& character : key) {
      character = character == '/' ? '.' : character;
    }
    return directory_ / key;
  }

  std::filesystem::path directory_;
};

// A directory that the destructor removes. Forked children must leave with _exit(), which runs no
// destructors.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    auto name = (std::filesystem::temp_directory_path() / "ddpx-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) {
      throw std::runtime_error("mkdtemp failed");
    }
    path_ = name;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::filesystem::path& path() const {
    return path_;
  }

 private:
  std::filesystem::path path_;
};

}  // namespace ddpx::shm
