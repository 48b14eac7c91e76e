// Memory files, the arena, and the errors for too little memory.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "os/limits.h"
#include "shm/arena.h"
#include "shm/error.h"

namespace ddpx::shm {
namespace {

TEST(MemoryTest, CannotBeResized) {
  const auto fd = os::create_memory(1 << 16, "a test");
  EXPECT_NE(ftruncate(fd.get(), 0), 0);
  EXPECT_NE(ftruncate(fd.get(), 1 << 20), 0);
}

TEST(MemoryTest, UnsealedFilesAreRefused) {
  const os::UniqueFd fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(fd.get(), 4096), 0);
  EXPECT_THROW(os::map_shared(fd.get()), os::Error);
}

TEST(MemoryTest, IsMappedOnceInAProcess) {
  const auto fd = os::create_memory(1 << 16, "a test");
  const os::UniqueFd copy(dup(fd.get()));

  const auto mapping = os::map_shared(fd.get());
  EXPECT_EQ(mapping, os::map_shared(copy.get()));
}

TEST(MemoryTest, TooLittleIsAnErrorWithARemedy) {
  os::override_available_memory(1 << 20);
  try {
    Arena().allocate(2 << 20);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kOutOfMemory);
    EXPECT_NE(std::string(error.what()).find("2097152 bytes"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("use the gloo backend"), std::string::npos);
  }
  os::override_available_memory(0);
  EXPECT_GT(os::available_memory().num_bytes, std::size_t{1} << 20);
}

// The error of an allocation of 2 MiB under a limit of this process.
Error error_under_limit(int resource, rlim_t limit) {
  std::signal(SIGXFSZ, SIG_IGN);  // as in Python
  rlimit usual{};
  getrlimit(resource, &usual);
  const rlimit lower{limit, usual.rlim_max};
  setrlimit(resource, &lower);
  Error found(ErrorKind::kMisuse, "no error");
  try {
    Arena().allocate(2 << 20);
  } catch (const Error& error) {
    found = error;
  }
  setrlimit(resource, &usual);
  std::signal(SIGXFSZ, SIG_DFL);
  return found;
}

// Less memory would not help.
TEST(MemoryTest, TheLimitOfFileSizesIsAnErrorWithItsOwnRemedy) {
  const auto error = error_under_limit(RLIMIT_FSIZE, 1 << 16);
  EXPECT_EQ(error.kind(), ErrorKind::kSystem) << error.what();
  EXPECT_NE(std::string(error.what()).find("ulimit -f"), std::string::npos) << error.what();
}

TEST(MemoryTest, TooManyOpenFilesAreAnErrorWithARemedy) {
  const auto error = error_under_limit(RLIMIT_NOFILE, 1);
  EXPECT_EQ(error.kind(), ErrorKind::kSystem) << error.what();
  EXPECT_NE(std::string(error.what()).find("ulimit -n"), std::string::npos) << error.what();
}

bool apply_filter(sock_filter* filter, std::size_t num_instructions) {
  const sock_fprog program{static_cast<unsigned short>(num_instructions), filter};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// Makes `memfd_create` fail with or without MFD_NOEXEC_SEAL in this process, by a seccomp filter.
bool filter_memfd_create(bool with_seal) {
  constexpr uint32_t kNoExecSeal = 8;
  constexpr uint32_t kRejected = SECCOMP_RET_ERRNO | EINVAL;
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_create, 0, 4),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])),
      BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, kNoExecSeal, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, with_seal ? kRejected : SECCOMP_RET_ALLOW),
      BPF_STMT(BPF_RET | BPF_K, with_seal ? SECCOMP_RET_ALLOW : kRejected),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  return apply_filter(filter, std::size(filter));
}

// Makes `fallocate` of more than 1 MiB fail with EINTR in this process.
bool interrupt_long_fallocate() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fallocate, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[3])),
      BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, 1 << 20, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINTR),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  return apply_filter(filter, std::size(filter));
}

// Allocates memory in a child behind a filter of system calls.
void expect_memory_behind(const std::function<bool()>& filter) {
  const auto child = fork();
  if (child == 0) {
    if (!filter()) {
      _exit(77);
    }
    alarm(10);
    try {
      _exit(os::create_memory(4 << 20, "a test") ? 0 : 1);
    } catch (const os::Error&) {
      _exit(1);
    }
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) {
    GTEST_SKIP() << "seccomp filters are not permitted here";
  }
  EXPECT_EQ(status, 0);
}

class MemoryFlagsTest : public testing::TestWithParam<bool> {};

// Linux 6.3 with vm.memfd_noexec=2 rejects calls without MFD_NOEXEC_SEAL. Older versions reject
// calls with it.
TEST_P(MemoryFlagsTest, AreThoseThatTheKernelAccepts) {
  expect_memory_behind([] { return filter_memfd_create(GetParam()); });
}

INSTANTIATE_TEST_SUITE_P(WithoutAndWithSeal, MemoryFlagsTest, testing::Bool());

// In old kernels, a signal undoes a whole call of `fallocate`. Between two signals of a timer, a
// profiler's for example, a rank may have time for few pages only.
TEST(MemoryTest, FrequentSignalsDoNotHoldUpAnAllocation) {
  expect_memory_behind(interrupt_long_fallocate);
}

// Two ranks that check at the same moment must not both get memory that exists once.
class ReservationTest : public testing::Test {
 protected:
  static constexpr uint64_t kOther = 60 << 20;  // bytes that another rank is about to allocate

  ReservationTest() {
    os::override_available_memory(100 << 20);
    *reserved_ = kOther;
    arena_.share_reservations(reserved_);
    thread_ = std::thread([this] {
      try {
        arena_.free(arena_.allocate(50 << 20));
        outcome_ = 1;
      } catch (const Error& error) {
        outcome_ = error.kind() == ErrorKind::kOutOfMemory ? 2 : 3;
      }
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
  ~ReservationTest() override {
    os::override_available_memory(0);
  }

  std::shared_ptr<std::atomic<uint64_t>> reserved_ = std::make_shared<std::atomic<uint64_t>>(0);
  Arena arena_;
  std::atomic<int> outcome_{0};
  std::thread thread_;
};

TEST_F(ReservationTest, IsWaitedForAndThenTheMemoryIsFree) {
  EXPECT_EQ(outcome_.load(), 0);
  reserved_->fetch_sub(kOther);
  thread_.join();
  EXPECT_EQ(outcome_.load(), 1);
  EXPECT_EQ(reserved_->load(), 0u);
}

TEST_F(ReservationTest, IsWaitedForAndThenTheMemoryIsTaken) {
  EXPECT_EQ(outcome_.load(), 0);
  os::override_available_memory((100 << 20) - kOther);
  reserved_->fetch_sub(kOther);
  thread_.join();
  EXPECT_EQ(outcome_.load(), 2);
  EXPECT_EQ(reserved_->load(), 0u);
}

TEST(ArenaTest, BlocksAreAlignedAndApart) {
  Arena arena;
  auto* first = static_cast<std::byte*>(arena.allocate(1));
  auto* second = static_cast<std::byte*>(arena.allocate(100));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % Arena::kAlignment, 0u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(second) % Arena::kAlignment, 0u);
  EXPECT_GE(second - first, 64);
  arena.free(first);
  arena.free(second);
}

TEST(ArenaTest, LocatesRangesInItsSegmentsOnly) {
  Arena arena;
  auto* block = static_cast<std::byte*>(arena.allocate(1000));
  const auto location = arena.locate(block + 10, 100);
  ASSERT_TRUE(location);
  EXPECT_GE(arena.segment_fd(location->segment), 0);
  EXPECT_FALSE(arena.locate(block, std::size_t{1} << 30));
  const std::vector<std::byte> elsewhere(100);
  EXPECT_FALSE(arena.locate(elsewhere.data(), 100));
  arena.free(block);
}

TEST(ArenaTest, LargeBlocksGiveTheirMemoryBack) {
  Arena arena;
  auto* small = arena.allocate(100);
  const auto before = arena.resident_bytes();
  auto* large = arena.allocate(50 << 20);
  EXPECT_GE(arena.resident_bytes(), before + (50u << 20));
  const auto location = arena.locate(large, 50 << 20);
  arena.free(large);
  EXPECT_EQ(arena.resident_bytes(), before);
  EXPECT_LT(arena.segment_fd(location->segment), 0);
  arena.free(small);
}

TEST(ArenaTest, UnknownBlocksAreRefused) {
  Arena arena;
  int elsewhere = 0;
  EXPECT_THROW(arena.free(&elsewhere), Error);
}

TEST(ArenaTest, RandomUseNeverOverlaps) {
  Arena arena;
  std::mt19937 random(1);
  struct Block {
    unsigned char* data;
    std::size_t size;
    unsigned char mark;
  };
  std::vector<Block> blocks;
  for (int round = 0; round < 3000; ++round) {
    if (blocks.size() < 40 && random() % 3 != 0) {
      const std::size_t size = random() % (random() % 50 == 0 ? (3u << 20) : 20'000u) + 1;
      const auto mark = static_cast<unsigned char>(round);
      auto* data = static_cast<unsigned char*>(arena.allocate(size));
      std::memset(data, mark, size);
      blocks.push_back({data, size, mark});
    } else if (!blocks.empty()) {
      const auto index = random() % blocks.size();
      const auto block = blocks[index];
      ASSERT_EQ(block.data[0], block.mark);
      ASSERT_EQ(std::memcmp(block.data, block.data + 1, block.size - 1), 0);
      arena.free(block.data);
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(index));
    }
  }
  for (const auto& block : blocks) {
    arena.free(block.data);
  }
  EXPECT_LE(arena.resident_bytes(), 4u << 20);
}

}  // namespace
}  // namespace ddpx::shm
