// Why an operation of gloo's failed: gloo's errors name no rank, the local group knows who is gone.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "../shm/group.h"

namespace ddpx {

// An operation that goes through gloo. Collectives need all ranks; send and recv only the partner,
// or any rank if there is none.
struct GlooCall {
  const char* name;
  bool collective = true;
  std::optional<int> partner = std::nullopt;
};

// Thread-safe.
class GlooFaults {
 public:
  // `single_host`: all ranks are in the local group, which then sees who is gone. Otherwise it only
  // tells that it has failed itself.
  GlooFaults(
      const std::shared_ptr<shm::Group>& group, int rank, const GlooCall& call, bool single_host);

  // gloo's error, or in its stead one of torch's that names the ranks that are gone, if the
  // operation needed them. Waits some seconds for them to be seen. A collective that fails so fails
  // the local group, so that ranks that wait for this one hear of it.
  std::exception_ptr explain(std::exception_ptr error) const;

  // What has failed the local group, as an error of torch's; null if it has not failed.
  std::exception_ptr group_failure() const;

  bool collective() const {
    return call_.collective;
  }

 private:
  std::optional<shm::Error> reason(shm::Group& group, const std::string& said) const;
  std::string phase() const;

  // Weak: a work that someone keeps must not keep a group that is destroyed.
  std::weak_ptr<shm::Group> group_;
  int rank_;
  GlooCall call_;
  bool single_host_;
};

}  // namespace ddpx
