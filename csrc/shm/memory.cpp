#include "memory.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>

#include "error.h"
#include "memory_limit.h"

namespace ddpx::shm {
namespace {

using FileId = std::pair<dev_t, ino_t>;

struct Registry {
  std::mutex mutex;
  std::map<FileId, std::weak_ptr<Mapping>> mappings;
};

// Never destroyed, since static destructors may release mappings.
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

Error out_of_memory(std::size_t num_bytes, const std::string& purpose, const std::string& cause) {
  return Error(
      ErrorKind::kOutOfMemory,
      "[ddpx shm] could not allocate " + std::to_string(num_bytes) +
          " bytes of shared memory for " + purpose + ": " + cause +
          ". Reduce the number of ranks on this host or the size of the model, raise the memory "
          "limit of the container, or use the gloo backend.");
}

// Allocates in steps: a signal that interrupts `fallocate` undoes the current step only.
void allocate_pages(int fd, std::size_t offset, std::size_t num_bytes, const std::string& purpose) {
  constexpr std::size_t kStep = std::size_t{64} << 20;
  const auto end = offset + num_bytes;
  for (auto begin = offset; begin < end;) {
    const auto length = std::min(kStep, end - begin);
    if (fallocate(fd, 0, static_cast<off_t>(begin), static_cast<off_t>(length)) == 0) {
      begin += length;
    } else if (errno != EINTR) {
      throw out_of_memory(num_bytes, purpose, std::strerror(errno));
    }
  }
}

void check_limit(std::size_t num_bytes, const std::string& purpose) {
  const auto limit = available_memory();
  if (num_bytes > limit.num_bytes) {
    throw out_of_memory(
        num_bytes,
        purpose,
        "only " + std::to_string(limit.num_bytes) + " bytes are available (" + limit.source + ")");
  }
}

}  // namespace

std::size_t page_bytes() {
  static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

Mapping::~Mapping() {
  munmap(data_, num_bytes_);
}

std::shared_ptr<Mapping> map_shared(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw Error(
        ErrorKind::kSystem,
        "[ddpx shm] a memory file that a local rank passed is not sealed against shrinking");
  }
  struct stat status{};
  if (fstat(fd, &status) != 0) {
    throw system_error("fstat of a memory file");
  }
  const FileId id(status.st_dev, status.st_ino);
  auto& known = registry();
  const std::lock_guard<std::mutex> lock(known.mutex);
  if (auto mapping = known.mappings[id].lock()) {
    return mapping;
  }
  const auto num_bytes = static_cast<std::size_t>(status.st_size);
  // MAP_POPULATE: the pages exist already, and the first operation should not cause a page fault
  // for each of them.
  void* data = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (data == MAP_FAILED && errno == ENOMEM) {
    throw out_of_memory(num_bytes, "a mapping", std::strerror(errno));
  }
  if (data == MAP_FAILED) {
    throw system_error("mmap of " + std::to_string(num_bytes) + " bytes of shared memory");
  }
  auto mapping = std::make_shared<Mapping>(static_cast<std::byte*>(data), num_bytes);
  std::erase_if(known.mappings, [](const auto& entry) { return entry.second.expired(); });
  known.mappings[id] = mapping;
  return mapping;
}

UniqueFd create_memory(std::size_t num_bytes, const std::string& purpose) {
  check_limit(num_bytes, purpose);
  UniqueFd fd(memfd_create("ddpx", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) {
    throw system_error("memfd_create");
  }
  if (ftruncate(fd.get(), static_cast<off_t>(num_bytes)) != 0) {
    throw out_of_memory(num_bytes, purpose, std::strerror(errno));
  }
  allocate_pages(fd.get(), 0, num_bytes, purpose);
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw system_error("sealing a memory file");
  }
  return fd;
}

void release_pages(int fd, std::size_t offset, std::size_t num_bytes) {
  // A failure is ignored: it costs memory, but no correctness.
  (void)fallocate(
      fd,
      FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
      static_cast<off_t>(offset),
      static_cast<off_t>(num_bytes));
}

}  // namespace ddpx::shm
