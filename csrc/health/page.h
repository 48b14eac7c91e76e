// The status page of one rank in one group: memory that its peers on the same machine can read,
// also after it has died.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "../shm/memory.h"
#include "activity.h"
#include "host_table.h"
#include "shared_text.h"

namespace ddpx::health {

enum class Presence : uint32_t {
  kThere = 0,
  kFailing = 1,     // its script ends because of an error; `cause` says which
  kLeft = 2,        // its process group was destroyed, or its script came to its end
  kTerminated = 3,  // its process got SIGTERM
};

// The buckets that a rank has launched in one step of one wrapper.
struct StepCalls {
  uint8_t model = 0;
  uint32_t step = 0;
  uint16_t num_launched = 0;
  uint64_t digest = 0;     // of the sizes and dtypes of all buckets so far
  uint64_t sequence = 0;   // of the group's calls, at the first launch; 0: not counted
  uint64_t results = 0;    // a sample of what the buckets came back with; 0 until the step's end
  uint64_t num_bytes = 0;  // of all buckets so far
  uint32_t wrapper = 0;    // the number that `model` is made of; with `step` it is unique

  // In place of results: of a rank that has found something wrong with its own gradients. It may
  // have written into a bucket in flight: ranks that did nothing wrong can differ by it, too.
  static constexpr uint64_t kSpoiled = 1;
  // And of one that has none to compare, as with a communication hook, or on a device.
  static constexpr uint64_t kNone = 2;

  bool has_results() const {
    return results > kNone;
  }

  Progress progress(Doing doing) const {
    return Progress{model, step, stage_of(doing), num_launched};
  }
};

// Mapped by all peers on the machine. Zeroed at first.
struct PageLayout {
  std::atomic<uint64_t> token;  // of the page's owner: who maps it knows that it is the right one
  std::atomic<uint64_t> activity;
  std::atomic<int64_t> since_ns;
  std::atomic<uint64_t> progress;
  std::atomic<uint32_t> presence;
  std::atomic<int32_t> culprit_plus_1;  // whom a failing rank fails because of; 0: itself
  SharedText<2048> cause;
  SharedText<1024> detail;  // of `activity`: what the owner found out about itself
  SharedText<2048> note;    // for agreements between survivors
  std::atomic<uint32_t> num_stack_requests;
  SharedText<32768> stack;  // answers to them

  struct CallsEntry {
    std::atomic<uint64_t> key;  // model, step and launches: Progress, packed
    std::atomic<uint64_t> digest;
    std::atomic<uint64_t> sequence;
    std::atomic<uint64_t> results;
    std::atomic<uint64_t> num_bytes;
    std::atomic<uint32_t> wrapper;
  };
  static constexpr std::size_t kNumSteps = 16;
  std::array<CallsEntry, kNumSteps> step_calls;
  HostTable host;  // of use on the page of the host's first member; the last member, as it grows

  static std::size_t num_bytes(int world_size) {
    return sizeof(PageLayout) - sizeof(HostTable) + HostTable::num_bytes(world_size);
  }
};

// A page that some process wrote or writes. Thread-safe.
class PageView {
 public:
  explicit PageView(std::shared_ptr<shm::Mapping> mapping) : mapping_(std::move(mapping)) {}

  // Lives as long as the mapping.
  std::shared_ptr<HostTable> host() const {
    return {mapping_, &layout().host};
  }
  PageLayout& layout() const {
    return *reinterpret_cast<PageLayout*>(mapping_->data());
  }

  Activity activity() const;
  Progress progress() const;
  Presence presence() const;
  // nullopt if the step has left the ring, or has not started.
  std::optional<StepCalls> calls(uint8_t model, uint32_t step) const;
  // The same step of the same wrapper. Numbers of models repeat, those of wrappers do not.
  std::optional<StepCalls> calls(const StepCalls& other) const {
    const auto found = calls(other.model, other.step);
    return found && found->wrapper == other.wrapper ? found : std::nullopt;
  }

 private:
  std::shared_ptr<shm::Mapping> mapping_;
};

// This process's own. Noting takes a handful of stores and a look at the clock.
class OwnPage {
 public:
  OwnPage(uint64_t token, int world_size);

  int fd() const {
    return fd_.get();
  }
  const PageView& view() const {
    return view_;
  }

  // For threads that hold the mutex of the reducer that it is about.
  void note(Doing doing, const StepCalls& calls, std::size_t bucket);
  void publish(const StepCalls& calls);

  // Only the first end counts, but that a failing rank may have seemed to end in another way.
  void leave();
  void mark_terminated();
  void fail(const std::string& cause, std::optional<int> culprit);

 private:
  shm::UniqueFd fd_;
  PageView view_;
};

}  // namespace ddpx::health
