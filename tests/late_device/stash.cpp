#include "stash.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace late {
namespace {

struct Launched {
  std::shared_ptr<Stash> stash;
  Queue* queue;
  Position end;
};

struct AllLaunched {
  std::mutex mutex;
  std::vector<Launched> collectives;
};

// Never destroyed, since collectives outlive their backend.
AllLaunched& all_launched() {
  static auto* const instance = new AllLaunched;
  return *instance;
}

}  // namespace

Stash::Stash(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {}

void Stash::clear() {
  std::vector<at::Tensor> dropped;  // freed after the mutex is released
  const std::lock_guard<std::mutex> lock(mutex_);
  dropped.swap(tensors_);
}

void clear_after(const std::shared_ptr<Stash>& stash, Queue& queue, Position end) {
  std::vector<Launched> ended;  // freed after the mutex is released
  auto& all = all_launched();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& launched = all.collectives;
  const auto first = std::stable_partition(launched.begin(), launched.end(), [](const auto& one) {
    return !one.queue->passed(one.end);
  });
  std::move(first, launched.end(), std::back_inserter(ended));
  launched.erase(first, launched.end());
  launched.push_back({stash, &queue, end});
}

}  // namespace late
