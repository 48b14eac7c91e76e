// The status page of one rank in one group: memory that peers on the same machine can read, also
// after the rank has died.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "../../os/memory.h"
#include "activity.h"
#include "frozen_params.h"
#include "host_table.h"
#include "recent_steps.h"
#include "shared_text.h"

namespace ddpx::health {

enum class Presence : uint32_t {
  kThere = 0,
  kFailing = 1,     // the script ends because of an error, which is `cause`
  kLeft = 2,        // the process group was destroyed, or the script has ended
  kTerminated = 3,  // the process got SIGTERM
};

// The error that a forward or backward of a rank has raised since the rank began its last step.
enum class Fault : uint32_t {
  kNone = 0,
  kOfStep = 1,    // an error of a backward, or of ddpx in a forward
  kOfModule = 2,  // an error of the module's own code in a forward
};

// All peers on the machine map the page. Zeroed at first. Any thread of any rank of the machine may
// use all members. OwnPage has the functions that only the owner may call.
struct StatusPage {
  std::atomic<uint64_t> token;         // identifies the page to a process that maps it
  SharedActivity current;              // of the host
  SharedActivity device;               // see DeviceProgress
  std::atomic<bool> captures;          // a step was captured, so `device` does not have all steps
  std::atomic<bool> trains_in_thread;  // the last forward ran in another thread than the main one
  std::atomic<uint64_t> num_calls;  // to the group, at the last check of the watchdog; 0: unknown
  std::atomic<uint64_t> num_syncs;  // begun synchronizations of buffers, of all wrappers
  std::atomic<Presence> state;
  std::atomic<bool> blames_peer;  // a failing rank fails because of another rank
  SharedText<2048> cause;
  SharedText<1024> detail;     // of the activity; see WrapperNames::describe_missing
  SharedText<2048> agreement;  // of survivors
  std::atomic<uint32_t> num_stack_requests;
  SharedText<32768> stack;    // the answer to the last request
  SharedText<8192> recorded;  // see RecordedCalls
  RecentSteps calls;
  FrozenParams frozen;
  std::atomic<Fault> fault;     // kNone again when the rank begins a step
  SharedActivity faulty;        // the activity that raised the last fault, and when
  SharedText<2048> fault_text;  // its first line
  HostTable host;  // used on one page of each host; the last member, since its size varies

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

// The status page behind a descriptor. Null if the file is too small. Throws os::Error unless the
// descriptor is that of a sealed memory file.
std::shared_ptr<StatusPage> map_page(int fd, int world_size);

// The status page of this rank. Owned by GroupState. Any thread may call any method.
//
// A page has the activity that was published last. publish(Doing), begin_call() and end_call() keep
// the wrapper and the step of the last activity. So they are for the thread that makes the
// collective calls of the group: in a script that makes these calls on several threads, no order of
// calls would be the same on all ranks. Threads that publish at the same moment, such as those of
// two devices with a wrapper each, never publish a mixture; only the start time may be that of the
// other thread.
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

  // Publishes an activity that begins now. A backward that launches a bucket keeps its start time.
  // Takes some stores, and reads the clock.
  void publish(Activity activity);

  // Publish the activity of the Python part: the construction of a wrapper, each collective call of
  // a construction, and waits for buffers.
  void begin_construction();
  void begin_call();  // has no effect outside a construction
  void end_call();
  void publish(Doing doing);

  // Numbers for model_of(): for the wrapper that all ranks have just constructed, and for another
  // wrapper before its first collective call.
  uint32_t number_of_constructed() const {
    return num_constructions_ - 1;
  }
  uint32_t next_number() {
    return kFirstOther + num_others_++;
  }

  // A forward or backward of this rank has raised an error, which the script may catch.
  void publish_fault(Fault fault, const std::string& text);
  // The next forward or backward begins. One atomic load if there was no fault.
  void go_on();

  // The first state other than kThere stays, except that kFailing replaces any other state.
  void end_as(Presence presence);  // kLeft or kTerminated
  void fail(const std::string& cause, bool blames_peer);

 private:
  os::UniqueFd fd_;
  std::shared_ptr<StatusPage> page_;
  std::atomic<uint32_t> num_constructions_{0};
  std::atomic<uint32_t> num_others_{0};
};

}  // namespace ddpx::health
