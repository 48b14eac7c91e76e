// A board in memory, for ranks that live in one process. It may be slow, hang, or be lost.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "health/board.h"

namespace ddpx::health {

// What all boards show.
struct FakeStore {
  std::mutex mutex;
  std::map<std::string, std::string> texts;
  std::condition_variable changed;
  bool lost = false;  // connections are broken
  bool server_ended = false;
  bool hung = false;
  std::atomic<int> delay_ms{0};  // of each answer

  void lose(bool with_server = true) {
    const std::lock_guard<std::mutex> lock(mutex);
    lost = true;
    server_ended = with_server;
    changed.notify_all();
  }
  // Until it is lost, or answers again.
  void hang() {
    const std::lock_guard<std::mutex> lock(mutex);
    hung = true;
  }
  void answer() {
    const std::lock_guard<std::mutex> lock(mutex);
    hung = false;
    changed.notify_all();
  }
  void put(const std::string& key, const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex);
    texts[key] = text;
  }
  bool has(const std::string& key) {
    const std::lock_guard<std::mutex> lock(mutex);
    return texts.count(key) != 0;
  }
};

class FakeBoard final : public Board {
 public:
  explicit FakeBoard(std::shared_ptr<FakeStore> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& text) override {
    const auto lock = open();
    store_->texts[key] = text;
  }
  std::optional<std::string> get(const std::string& key) override {
    const auto lock = open();
    const auto found = store_->texts.find(key);
    return found == store_->texts.end() ? std::nullopt : std::make_optional(found->second);
  }
  std::string set_first(const std::string& key, const std::string& text) override {
    const auto lock = open();
    return store_->texts.try_emplace(key, text).first->second;
  }
  std::function<bool()> server_ended() const override {
    return [store = store_] {
      const std::lock_guard<std::mutex> lock(store->mutex);
      return store->server_ended;
    };
  }

 private:
  std::unique_lock<std::mutex> open() {
    std::this_thread::sleep_for(std::chrono::milliseconds(store_->delay_ms));
    std::unique_lock<std::mutex> lock(store_->mutex);
    store_->changed.wait(lock, [this] { return store_->lost || !store_->hung; });
    if (store_->lost) {
      throw std::runtime_error("the store is gone");
    }
    return lock;
  }

  std::shared_ptr<FakeStore> store_;
};

}  // namespace ddpx::health
