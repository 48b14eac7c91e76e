#include "memory.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "error.h"
#include "limits.h"

namespace ddpx::os {
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

std::string could_not_allocate(
    std::size_t num_bytes, const std::string& purpose, const std::string& cause) {
  return "could not allocate " + std::to_string(num_bytes) + " bytes of shared memory for " +
         purpose + ": " + cause;
}

OutOfMemory out_of_memory(
    std::size_t num_bytes, const std::string& purpose, const std::string& cause) {
  return OutOfMemory(could_not_allocate(num_bytes, purpose, cause));
}

// Throws the error of a failed call, from errno.
[[noreturn]] void fail_to_allocate(std::size_t num_bytes, const std::string& purpose) {
  if (errno == EFBIG) {
    constexpr const char* kCause =
        "the limit of file sizes (ulimit -f) also holds for shared memory. Raise the limit.";
    throw Error(could_not_allocate(num_bytes, purpose, kCause));
  }
  throw out_of_memory(num_bytes, purpose, std::strerror(errno));
}

// In old kernels, a signal that interrupts `fallocate` undoes the whole call. Each interruption
// halves the step, so that calls become shorter than the time between the signals of a timer.
void allocate_pages(int fd, std::size_t num_bytes, const std::string& purpose) {
  auto step = std::size_t{64} << 20;
  for (std::size_t begin = 0; begin < num_bytes;) {
    const auto length = std::min(step, num_bytes - begin);
    if (fallocate(fd, 0, static_cast<off_t>(begin), static_cast<off_t>(length)) == 0) {
      begin += length;
    } else if (errno == EINTR) {
      step = std::max(length / 2, page_bytes());
    } else {
      fail_to_allocate(num_bytes, purpose);
    }
  }
}

OutOfMemory too_little(
    std::size_t num_bytes, const std::string& purpose, const MemoryLimit& limit) {
  return out_of_memory(
      num_bytes,
      purpose,
      "only " + std::to_string(limit.num_bytes) + " bytes are available (" + limit.source + ")");
}

// A part of the available memory that this rank is about to allocate. Without reservations, ranks
// that check at the same moment would each find the memory that they can have only once.
class Reservation {
 public:
  Reservation(std::atomic<uint64_t>& reserved, std::size_t num_bytes, const std::string& purpose)
      : reserved_(reserved), num_bytes_(num_bytes) {
    const auto deadline = std::chrono::steady_clock::now() + kMaxWait;
    while (true) {
      const auto total = reserved_.fetch_add(num_bytes_) + num_bytes_;
      const auto limit = available_memory();  // read after `reserved_`, so that no page is missed
      if (total <= limit.num_bytes) {
        return;
      }
      reserved_.fetch_sub(num_bytes_);
      // Pages that another rank has already taken count twice until the rank is done.
      if (total == num_bytes_ || std::chrono::steady_clock::now() >= deadline) {
        throw too_little(num_bytes, purpose, limit);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  ~Reservation() {
    reserved_.fetch_sub(num_bytes_);
  }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

 private:
  // A rank that was killed while it allocated leaves its reservation behind.
  static constexpr auto kMaxWait = std::chrono::seconds(10);

  std::atomic<uint64_t>& reserved_;
  uint64_t num_bytes_;
};

// Linux 6.3 with vm.memfd_noexec=2 rejects memory files without MFD_NOEXEC_SEAL. Older versions
// reject the flag.
UniqueFd new_memory_file() {
  constexpr unsigned kNoExecSeal = 8;
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  UniqueFd fd(memfd_create("ddpx", kFlags | kNoExecSeal));
  if (!fd && errno == EINVAL) {
    fd = UniqueFd(memfd_create("ddpx", kFlags));
  }
  if (!fd) {
    throw system_error("memfd_create");
  }
  return fd;
}

}  // namespace

std::size_t page_bytes() {
  static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

Mapping::~Mapping() {
  munmap(data_, num_bytes_);
}

std::shared_ptr<Mapping> map_shared(int fd, PageTable entries) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw Error("a memory file that a local rank passed is not sealed against shrinking");
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
  const int flags = MAP_SHARED | (entries == PageTable::kNow ? MAP_POPULATE : 0);
  void* data = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
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

void check_memory(std::size_t num_bytes, const std::string& purpose) {
  const auto limit = available_memory();
  if (num_bytes > limit.num_bytes) {
    throw too_little(num_bytes, purpose, limit);
  }
}

UniqueFd create_memory(
    std::size_t num_bytes, const std::string& purpose, std::atomic<uint64_t>* reserved_bytes) {
  std::atomic<uint64_t> alone{0};
  const Reservation reservation(reserved_bytes ? *reserved_bytes : alone, num_bytes, purpose);
  auto fd = new_memory_file();
  if (ftruncate(fd.get(), static_cast<off_t>(num_bytes)) != 0) {
    fail_to_allocate(num_bytes, purpose);
  }
  allocate_pages(fd.get(), num_bytes, purpose);
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

}  // namespace ddpx::os
