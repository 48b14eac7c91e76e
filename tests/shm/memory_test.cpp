// Memory files, the arena, and the errors for too little memory.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <vector>

#include "shm/arena.h"
#include "shm/error.h"
#include "shm/memory_limit.h"

namespace ddpx::shm {
namespace {

TEST(MemoryTest, CannotBeResized) {
  const auto fd = create_memory(1 << 16, "a test");
  EXPECT_NE(ftruncate(fd.get(), 0), 0);
  EXPECT_NE(ftruncate(fd.get(), 1 << 20), 0);
}

TEST(MemoryTest, UnsealedFilesAreRefused) {
  const UniqueFd fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(fd.get(), 4096), 0);
  EXPECT_THROW(map_shared(fd.get()), Error);
}

TEST(MemoryTest, IsMappedOnceInAProcess) {
  const auto fd = create_memory(1 << 16, "a test");
  const UniqueFd copy(dup(fd.get()));

  const auto mapping = map_shared(fd.get());
  EXPECT_EQ(mapping, map_shared(copy.get()));
}

TEST(MemoryTest, TooLittleIsAnErrorWithARemedy) {
  override_available_memory(1 << 20);
  try {
    create_memory(2 << 20, "a test");
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kOutOfMemory);
    EXPECT_NE(std::string(error.what()).find("2097152 bytes"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("use the gloo backend"), std::string::npos);
  }
  override_available_memory(0);
  EXPECT_GT(available_memory().num_bytes, std::size_t{1} << 20);
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
