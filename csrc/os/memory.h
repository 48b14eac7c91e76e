// Anonymous shared memory: memory files without a name, and mappings of them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "unique_fd.h"

namespace ddpx::os {

// One mapping, unmapped by the destructor. A process maps a memory file once, even if several ranks
// run in the process. ThreadSanitizer then sees that these ranks access the same memory.
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

// When the pages of a mapping, which exist already, enter the page table of this process.
enum class PageTable {
  kNow,       // the first operation then causes no page faults
  kAtAccess,  // for pages most of which a rank never reads
};

// Maps the whole file behind `fd`. Thread-safe. Throws an Error unless the file is sealed against
// shrinking: a peer that shrank the file would turn a later access into SIGBUS.
std::shared_ptr<Mapping> map_shared(int fd, PageTable entries = PageTable::kNow);

// Throws OutOfMemory, with `purpose` in the text, unless this process could allocate `num_bytes`.
void check_memory(std::size_t num_bytes, const std::string& purpose);

// Creates a memory file of this size, sealed against resizing. All pages are allocated, so that too
// little memory is an error here and not SIGBUS later. `reserved_bytes`, in shared memory, is the
// sum of what ranks are allocating at this moment: the available memory must be enough for all of
// them. Throws OutOfMemory, with `purpose` in the text, and an Error for another limit of the
// process: of file sizes, or of open files.
UniqueFd create_memory(
    std::size_t num_bytes,
    const std::string& purpose,
    std::atomic<uint64_t>* reserved_bytes = nullptr);

// Returns the pages of a range to the system. Later reads of the range give zeros.
void release_pages(int fd, std::size_t offset, std::size_t num_bytes);

std::size_t page_bytes();

inline std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace ddpx::os
