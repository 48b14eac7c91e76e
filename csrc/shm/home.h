// The home segment of one rank, and the addresses of its parts.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "../os/memory.h"
#include "layout.h"

namespace ddpx::shm {

struct HomeSizes {
  std::size_t one_shot_bytes;  // operations of at most this size take one step
  std::size_t piece_bytes;     // larger operations are staged in pieces of this size
};

// A mapping of a home segment (see layout.h). Rendezvous creates it, and Peers owns it. All threads
// may call it; access to the memory itself follows the rules in layout.h.
class HomeSegment {
 public:
  // Creates the segment of this rank. Throws kOutOfMemory, unless there is memory for the segments
  // of all local ranks, which are created at the same time.
  static HomeSegment create(
      int rank, const HomeSizes& sizes, const std::string& token, std::size_t num_local_ranks);

  // Maps the segment of a peer. Returns null unless the file is a home with that token and these
  // sizes.
  static std::shared_ptr<HomeSegment> open(
      os::UniqueFd fd, const HomeSizes& sizes, const std::string& token);

  Home& home() const {
    return *reinterpret_cast<Home*>(mapping_->data());
  }

  int fd() const {
    return fd_.get();
  }

  const HomeSizes& sizes() const {
    return sizes_;
  }

  std::byte* one_shot(uint64_t sequence) const;
  std::byte* input_area(int half) const;
  std::byte* result_area(int half) const;

  std::size_t result_bytes() const {
    return sizes_.piece_bytes / 2;
  }

 private:
  HomeSegment(os::UniqueFd fd, std::shared_ptr<os::Mapping> mapping, const HomeSizes& sizes)
      : fd_(std::move(fd)), mapping_(std::move(mapping)), sizes_(sizes) {}

  os::UniqueFd fd_;
  std::shared_ptr<os::Mapping> mapping_;
  HomeSizes sizes_;
};

}  // namespace ddpx::shm
