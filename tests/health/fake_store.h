// A store in memory, for ranks that live in one process. It may be slow, stop, or end.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "health/hosts/store.h"

namespace ddpx::health {

using times::kMillisecond;
using times::kSecond;

// The server.
struct FakeStore {
  std::mutex mutex;
  std::map<std::string, std::string> texts;
  std::map<std::string, int> num_sets;
  std::condition_variable changed;
  std::set<std::string> keys_read;  // by multi_get
  bool lost = false;                // connections are broken
  bool hung = false;
  int age = 0;                   // connections of an earlier age are broken
  std::atomic<int> delay_ms{0};  // of each answer
  std::atomic<int> num_connections{0};
  std::atomic<int> num_requests{0};

  void lose() {
    const std::lock_guard<std::mutex> lock(mutex);
    lost = true;
    changed.notify_all();
  }
  // Breaks all connections. A new one works.
  void break_connections() {
    const std::lock_guard<std::mutex> lock(mutex);
    ++age;
    changed.notify_all();
  }
  // Requests then wait until the store is lost, or answers again.
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
    ++num_sets[key];
    changed.notify_all();
  }
  bool has(const std::string& key) {
    const std::lock_guard<std::mutex> lock(mutex);
    return texts.count(key) != 0;
  }
};

class FakeConnection final : public Store {
 public:
  explicit FakeConnection(std::shared_ptr<FakeStore> store) : store_(std::move(store)) {
    {
      const std::lock_guard<std::mutex> lock(store_->mutex);
      age_ = store_->age;
      if (store_->lost) {
        throw StoreEnded();
      }
      ++store_->num_connections;
    }
    open();
  }
  ~FakeConnection() override {
    --store_->num_connections;
  }

  void set(const std::vector<std::string>& keys, const std::string& text) override {
    const auto lock = open();
    for (const auto& key : keys) {
      store_->texts[key] = text;
      ++store_->num_sets[key];
    }
    store_->changed.notify_all();
  }
  std::optional<std::string> get(const std::string& key) override {
    const auto lock = open();
    const auto found = store_->texts.find(key);
    return found == store_->texts.end() ? std::nullopt : std::make_optional(found->second);
  }
  std::string set_first(const std::string& key, const std::string& text) override {
    const auto lock = open();
    store_->changed.notify_all();
    return store_->texts.try_emplace(key, text).first->second;
  }
  void append(const std::string& key, const std::string& text) override {
    const auto lock = open();
    store_->texts[key] += text;
  }
  int64_t add(const std::string& key, int64_t value) override {
    const auto lock = open();
    auto& text = store_->texts[key];
    text = std::to_string((text.empty() ? 0 : std::stoll(text)) + value);
    return std::stoll(text);
  }
  std::vector<std::string> multi_get(const std::vector<std::string>& keys) override {
    const auto lock = open();
    std::vector<std::string> found;
    for (const auto& key : keys) {
      found.push_back(store_->texts.at(key));
      store_->keys_read.insert(key);
    }
    return found;
  }
  void await(const std::string& key) override {
    auto lock = open();
    // As in torch's store, a key that is set wakes all that wait for it.
    const int before = store_->num_sets[key];
    store_->changed.wait(lock, [&] {
      return is_broken() || store_->texts.erase(key) != 0 || store_->num_sets[key] != before;
    });
    if (is_broken()) {
      throw std::runtime_error("the store is gone");
    }
  }

 private:
  std::unique_lock<std::mutex> open() {
    ++store_->num_requests;
    std::this_thread::sleep_for(std::chrono::milliseconds(store_->delay_ms));
    std::unique_lock<std::mutex> lock(store_->mutex);
    store_->changed.wait(lock, [this] { return is_broken() || !store_->hung; });
    if (is_broken()) {
      throw std::runtime_error("the store is gone");
    }
    return lock;
  }

  bool is_broken() const {
    return store_->lost || age_ != store_->age;
  }

  std::shared_ptr<FakeStore> store_;
  int age_ = 0;
};

inline StoreAccess access_to(const std::shared_ptr<FakeStore>& store) {
  return [store] { return std::make_unique<FakeConnection>(store); };
}

}  // namespace ddpx::health
