// Anonymous shared memory: a file that has no name anywhere, and its mapping.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "unique_fd.h"

namespace ddpx::shm {

// One mapping, unmapped with the last reference. Within a process a memory file is mapped once,
// however many ranks run in it: ThreadSanitizer then sees that they touch the same memory.
class Mapping {
 public:
  Mapping(std::byte* data, std::size_t num_bytes) : data_(data), num_bytes_(num_bytes) {}
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const {
    return data_;
  }

  std::size_t num_bytes() const {
    return num_bytes_;
  }

 private:
  std::byte* data_;
  std::size_t num_bytes_;
};

// Maps the whole file behind `fd`. It must be sealed against shrinking (else a peer could turn a
// later access into SIGBUS).
std::shared_ptr<Mapping> map_shared(int fd);

// A memory file of that size, with every page there (no SIGBUS later), sealed against resizing.
// Throws kOutOfMemory if there is not enough; `purpose` says for what it was wanted.
UniqueFd create_memory(std::size_t num_bytes, const std::string& purpose);

// Gives the pages of a range back to the system; they read as zeros when they are back.
void release_pages(int fd, std::size_t offset, std::size_t num_bytes);

std::size_t page_bytes();

inline std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace ddpx::shm
