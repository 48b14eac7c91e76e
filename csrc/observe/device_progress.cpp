#include "device_progress.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <iterator>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "../buckets/device_stream.h"
#include "../health/times.h"
#include "../os/forks.h"

namespace ddpx {
namespace {

using health::Activity;
using health::Doing;

constexpr auto kInterval = std::chrono::nanoseconds(health::times::kDevicePoll);
constexpr std::size_t kMostSteps = 16;

// A query of an event from this thread spoils no capture of another thread, as in torch's own
// watchdog. The extension does not link CUDA, and finds the function where CUDA is loaded.
void allow_captures_of_other_threads() {
  using Exchange = int (*)(int*);
  constexpr int kThreadLocal = 1;  // cudaStreamCaptureModeThreadLocal
  void* found = dlsym(RTLD_DEFAULT, "cudaThreadExchangeStreamCaptureMode");
  if (found != nullptr) {
    int mode = kThreadLocal;
    reinterpret_cast<Exchange>(found)(&mode);
  }
}

}  // namespace

// The steps of a group's wrappers that the device has not done, as far as they have events.
struct DeviceProgress::Steps {
  struct Marked {
    Events computed;
    Events reduced;
    Activity waiting;
    std::shared_ptr<std::atomic<int64_t>> num_reduced;  // of the step's wrapper
  };

  Steps(std::shared_ptr<health::Monitor> watching, std::vector<c10::Device> of_events)
      : monitor(std::move(watching)), devices(std::move(of_events)) {}

  // The oldest step; null if there is none. Valid until look() removes the step.
  Marked* front() {
    const std::lock_guard<std::mutex> lock(mutex);
    return marked.empty() ? nullptr : &marked.front();
  }

  Events take_events() {
    const std::lock_guard<std::mutex> lock(mutex);
    Events events;
    if (!spare.empty()) {
      events = std::move(spare.back());
      spare.pop_back();
    }
    while (events.size() < devices.size()) {
      events.emplace_back(devices[events.size()].type());
    }
    return events;
  }

  // With the mutex.
  void recycle(Marked& step) {
    spare.push_back(std::move(step.computed));
    spare.push_back(std::move(step.reduced));
  }

  static bool have_ended(const Events& events) {
    return std::all_of(events.begin(), events.end(), [](const auto& each) { return each.query(); });
  }

  // Returns whether steps are left. For one thread, without the mutex: a query may block.
  bool look() {
    // A thread without a device would be given device 0 when an event of another device ends.
    c10::impl::VirtualGuardImpl(devices.front().type()).setDevice(devices.front());
    auto& activity_of_device = monitor->page().view().device;
    while (auto* step = front()) {
      const bool computed = have_ended(step->computed);
      if (!computed || !have_ended(step->reduced)) {
        auto activity = step->waiting;
        activity.doing = computed ? Doing::kWaiting : Doing::kBackward;
        if (const auto known = activity_of_device.known();
            !known || known->packed() != activity.packed()) {
          activity.since_ns = health::now_ns();
          activity_of_device.store(activity);
        }
        return true;
      }
      activity_of_device.forget();
      if (!monitor->state().abort->has_begun) {  // the step ended before an abort
        *step->num_reduced = step->waiting.training_step() + 1;
      }
      const std::lock_guard<std::mutex> lock(mutex);
      recycle(*step);
      marked.pop_front();
    }
    return false;
  }

  const std::shared_ptr<health::Monitor> monitor;
  const std::vector<c10::Device> devices;
  std::mutex mutex;  // guards what follows
  std::deque<Marked> marked;
  std::vector<Events> spare;  // to record again, since making an event takes longer
};

// One a process. A call to a device may block for as long as a kernel runs, so the watchdog does
// not make such calls. Never destroyed.
class DeviceProgress::Thread {
 public:
  static Thread& instance() {
    return os::instance_in_process<Thread>();
  }

  // Of the group that the monitor watches over.
  std::shared_ptr<Steps> steps_of(
      const std::shared_ptr<health::Monitor>& monitor, const std::vector<c10::Device>& devices) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(all_, [](const auto& steps) { return steps.expired(); });
    for (const auto& weak : all_) {
      if (auto steps = weak.lock();
          steps && steps->monitor == monitor && steps->devices == devices) {
        return steps;
      }
    }
    auto made = std::make_shared<Steps>(monitor, devices);
    all_.push_back(made);
    return made;
  }

  // `steps` has its first step.
  void look_after(const std::shared_ptr<Steps>& steps) {
    const std::lock_guard<std::mutex> lock(mutex_);
    busy_.push_back(steps);
    if (!running_) {
      std::thread([this] { work(); }).detach();
      running_ = true;
    }
    changed_.notify_one();
  }

 private:
  void work() {
    allow_captures_of_other_threads();
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !busy_.empty(); });
      auto busy = std::exchange(busy_, {});
      lock.unlock();
      std::this_thread::sleep_for(kInterval);
      decltype(busy_) still_busy;
      std::copy_if(busy.begin(), busy.end(), std::back_inserter(still_busy), [](const auto& steps) {
        return is_busy(*steps);
      });
      lock.lock();
      busy_.insert(busy_.end(), still_busy.begin(), still_busy.end());
    }
  }

  // The device may have failed, or may be shutting down: nothing more is known of it.
  static bool is_busy(Steps& steps) noexcept {
    try {
      const auto presence = steps.monitor->page().view().presence();
      const bool ends =
          presence != health::Presence::kThere && presence != health::Presence::kFailing;
      return !ends && steps.look();
    } catch (const std::exception&) {
      steps.monitor->page().view().device.forget();
      return false;
    }
  }

  std::mutex mutex_;  // guards the following
  std::condition_variable changed_;
  std::vector<std::weak_ptr<Steps>> all_;
  std::vector<std::shared_ptr<Steps>> busy_;  // also of wrappers that are gone
  bool running_ = false;
};

DeviceProgress::DeviceProgress(
    std::shared_ptr<health::Monitor> monitor, std::vector<c10::Device> devices, int64_t num_steps)
    : devices_(std::move(devices)) {
  if (monitor && !devices_.front().is_cpu() && monitor->state().group.on_device) {
    steps_ = Thread::instance().steps_of(monitor, devices_);
    num_reduced_ = std::make_shared<std::atomic<int64_t>>(num_steps);
  }
}

std::optional<int64_t> DeviceProgress::num_reduced() const {
  return num_reduced_ ? std::optional(num_reduced_->load()) : std::nullopt;
}

void DeviceProgress::set_captured(bool captured) {
  captured_ = captured;
  if (captured && steps_) {
    steps_->monitor->page().view().captures = true;
  }
}

void DeviceProgress::mark_computed() {
  without_errors([this] { record_computed(); });
}

void DeviceProgress::mark_reduced(const Activity& waiting) {
  without_errors([&] { record_reduced(waiting); });
}

// An error of the device stops no step here: the next call of the step itself meets it.
template <class Record>
void DeviceProgress::without_errors(const Record& record) {
  try {
    record();
  } catch (const std::exception&) {
    computed_.reset();
    steps_ = nullptr;
  }
}

bool DeviceProgress::is_captured() const {
  return captured_ || std::any_of(devices_.begin(), devices_.end(), is_capturing);
}

void DeviceProgress::record(Events& events) const {
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    events[i].record(*current_stream(devices_[i]));
  }
}

void DeviceProgress::record_computed() {
  if (!steps_ || is_captured()) {
    computed_.reset();
    return;
  }
  if (!computed_) {
    computed_.emplace(steps_->take_events());
  }
  record(*computed_);
}

void DeviceProgress::record_reduced(const Activity& waiting) {
  if (!computed_ || is_captured()) {
    return;
  }
  auto reduced = steps_->take_events();
  record(reduced);
  bool is_first = false;
  {
    const std::lock_guard<std::mutex> lock(steps_->mutex);
    is_first = steps_->marked.empty();
    if (steps_->marked.size() >= kMostSteps) {
      steps_->recycle(steps_->marked.back());
      steps_->marked.pop_back();
    }
    steps_->marked.push_back({std::move(*computed_), std::move(reduced), waiting, num_reduced_});
  }
  computed_.reset();
  if (is_first) {
    Thread::instance().look_after(steps_);
  }
}

}  // namespace ddpx
