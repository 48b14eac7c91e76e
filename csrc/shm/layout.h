// What lies in a rank's home segment: the memory that its local peers map when they meet.
//
//   Home                      one page or more: who it is, how far it is, its descriptors
//   one-shot buffers          kRing x one_shot_bytes
//   staging, 2 halves         each: input area (piece_bytes), result area (piece_bytes / 2)
//
// Every field has one writer, the owner, but for `Board`, which is shared by all and used only in
// the home of local rank 0. Fresh memory is zero, which is the right start for every counter.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "futex.h"
#include "types.h"

namespace ddpx::shm {

constexpr std::size_t kLine = 64;  // bytes that cores pass between them as one
constexpr uint64_t kHomeMagic = 0x6464'7078'2d73'686d;
constexpr uint32_t kLayoutVersion = 1;
constexpr std::size_t kTokenBytes = 16;

// A rank can be one operation ahead of another (see steps.h), so two would do.
constexpr std::size_t kRing = 4;

// A buffer in an arena segment of the rank that names it; segment 0 means that it is private.
struct BufferRef {
  uint32_t segment = 0;
  uint64_t offset = 0;
};

// One rank's view of one operation. Written before the rank arrives at the operation's first step,
// read by the others after it.
struct Descriptor {
  uint64_t sequence = 0;
  Kind kind{};
  DType dtype{};
  ReduceOp op{};
  Order order{};
  int32_t root = 0;
  uint64_t count = 0;
  BufferRef buffer;
};

struct alignas(kLine) StepCounter {
  Word count;     // arrivals, of all ranks and all steps
  Word sleepers;  // ranks that sleep, or are about to
};

struct alignas(kLine) FailureRecord {
  Word state;  // see failure.h
  int32_t kind;
  int32_t culprit;
  char text[500];
};

struct Board {
  StepCounter steps;
  FailureRecord failure;
};

enum class Presence : uint32_t { kJoined = 0, kLeft = 1 };

struct Home {
  uint64_t magic;
  uint32_t version;
  int32_t rank;
  uint64_t one_shot_bytes;
  uint64_t piece_bytes;
  char token[kTokenBytes];
  alignas(kLine) Word presence;           // a Presence
  alignas(kLine) Word steps;              // steps that the owner has arrived at
  std::atomic<int32_t> core;              // on which it last arrived at a step
  alignas(kLine) Descriptor ring[kRing];  // by sequence number
  Board board;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace ddpx::shm
