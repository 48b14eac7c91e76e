// The status page of one rank in one group: memory that its peers on the same machine can read,
// also after it has died.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "../../os/memory.h"
#include "../calls/frozen_params.h"
#include "../calls/recent_steps.h"
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

// Mapped by all peers on the machine. Zeroed at first. All members are atomics, so any thread of
// any rank of the machine may use them. OwnPage has what only the rank itself writes.
struct StatusPage {
  std::atomic<uint64_t> token;      // of the page: who maps the page knows that it is the right one
  SharedActivity current;           // of the host
  SharedActivity device;            // see DeviceProgress
  std::atomic<uint64_t> num_calls;  // to the group, as its watchdog counted them last; 0: unknown
  std::atomic<Presence> state;
  std::atomic<bool> blames_peer;  // a failing rank fails because of another rank
  SharedText<2048> cause;
  SharedText<1024> detail;  // of the activity: what the owner found out about itself
  SharedText<2048> note;    // for agreements between survivors
  std::atomic<uint32_t> num_stack_requests;
  SharedText<32768> stack;    // answers to them
  SharedText<8192> recorded;  // the last calls, see RecordedCalls
  RecentSteps calls;
  FrozenParams frozen;
  std::atomic<int64_t> fault_ns;  // when a forward or backward raised; 0 once the rank goes on
  std::atomic<bool> fault_is_of_module;  // the module's own code raised in a forward
  SharedText<2048> fault;                // the first line of that error
  HostTable host;  // of use on the page of the host's first member; the last member, as it grows

  Activity activity() const {
    return current.load();
  }
  Presence presence() const {
    return state.load(std::memory_order_acquire);
  }
  static std::size_t num_bytes(int world_size) {
    return sizeof(StatusPage) - sizeof(HostTable) + HostTable::num_bytes(world_size);
  }
};

// The status page behind a descriptor. Null if the file is too small. Throws os::Error if it is no
// memory file.
std::shared_ptr<StatusPage> map_page(int fd, int world_size);

// This rank's own.
class OwnPage {
 public:
  OwnPage(uint64_t token, int world_size);

  int fd() const {
    return fd_.get();
  }
  StatusPage& view() const {
    return *page_;
  }
  std::shared_ptr<HostTable> host() const {
    return {page_, &page_->host};
  }

  // Publishes an activity that begins now. A backward goes on while it launches buckets. Takes some
  // stores and a look at the clock.
  void note(Activity activity);

  // A forward or backward of this rank has raised an error, which the script may catch.
  void note_fault(const std::string& text, bool is_of_module = false);
  // The next forward or backward begins. One load without a fault.
  void go_on();

  // Only the first end counts, but that a failing rank may have seemed to end in another way.
  void leave();
  void mark_terminated();
  void fail(const std::string& cause, bool blames_peer);

 private:
  void end_as(Presence presence);

  os::UniqueFd fd_;
  std::shared_ptr<StatusPage> page_;
};

}  // namespace ddpx::health
