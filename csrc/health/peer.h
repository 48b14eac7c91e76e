// Another rank of the group, as this rank sees it.
#pragma once

#include <memory>
#include <optional>

#include "introduction.h"
#include "page.h"
#include "process.h"

namespace ddpx::health {

// Owned by the peers. Immutable, and thread-safe.
class Peer {
 public:
  // A peer is local if this process can open its status page, or sees its process with the claimed
  // start time. Machines may claim to be the same: virtual machines that are copies of each other.
  // `host`: the table of this rank's host; null in tests.
  Peer(Introduction introduction, const ProcessId& self, std::shared_ptr<HostTable> host);

  int rank() const {
    return introduction_.rank;
  }
  const Introduction& introduction() const {
    return introduction_;
  }
  bool local() const {
    return watch_ != nullptr;
  }
  // Null if the peer is not local.
  const ProcessWatch* watch() const {
    return watch_.get();
  }
  // Whether a signal has stopped the process, as far as this process can tell.
  bool stopped() const {
    return local() && watch_->state() == 'T';
  }
  // Null if this process cannot open the page.
  const PageView* page() const {
    return page_ ? &*page_ : nullptr;
  }

  // nullopt if unknown. Of a rank of another host: the last that its host wrote.
  std::optional<Activity> activity() const;
  std::optional<Progress> progress() const;

  // When the host of the rank last wrote something new; 0 for ranks of this host.
  int64_t heard_ns() const;

 private:
  const HostTable::Rank* entry() const;

  const Introduction introduction_;
  const std::shared_ptr<HostTable> host_;
  std::unique_ptr<ProcessWatch> watch_;
  std::optional<PageView> page_;
};

// The status page of a rank; nullopt if this process cannot open it.
std::optional<PageView> open_page(const Introduction& rank, int world_size);

}  // namespace ddpx::health
