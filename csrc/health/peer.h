// Another rank of the group, as this one sees it.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "introduction.h"
#include "page.h"
#include "process.h"

namespace ddpx::health {

// Thread-safe.
class Peer {
 public:
  // None if `introduction` is one of an earlier life: its process is there, but not that page.
  static std::shared_ptr<Peer> meet(
      int rank, const Introduction& introduction, const ProcessId& self);

  int rank() const {
    return rank_;
  }
  const Introduction& introduction() const {
    return introduction_;
  }

  // On this machine; what follows tells nothing of others, but for what they have told last.
  bool local() const {
    return watch_ != nullptr;
  }
  const ProcessWatch* watch() const {
    return watch_.get();
  }
  bool stopped() const {  // by a signal, as far as can be told
    return local() && watch_->state() == 'T';
  }
  // Null if its memory may not be read (another user's), or it is not local.
  const PageView* page() const {
    return page_ ? &*page_ : nullptr;
  }

  std::optional<Activity> activity() const;
  std::optional<Progress> progress() const;

  // What a rank of another machine told of itself through the store; the time since it last told
  // anything is all that is known of whether it lives.
  struct Beat {
    uint64_t count = 0;
    Activity activity;
    Progress progress;

    std::string to_text() const;
    static std::optional<Beat> from_text(const std::string& text);
  };
  void heard(const Beat& beat);
  // Since when it has said nothing new; 0 if it never spoke.
  int64_t silent_since_ns() const;

 private:
  Peer(int rank, Introduction introduction) : rank_(rank), introduction_(std::move(introduction)) {}

  int rank_;
  Introduction introduction_;
  std::unique_ptr<ProcessWatch> watch_;
  std::optional<PageView> page_;
  mutable std::mutex mutex_;
  std::optional<Beat> beat_;
  int64_t heard_ns_ = 0;
};

}  // namespace ddpx::health
