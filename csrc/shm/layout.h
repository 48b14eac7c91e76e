// The layout of a rank's home segment, which all local peers map in the rendezvous.
//
//   Home                      at least one page: identity, progress and descriptors of the rank
//   one-shot buffers          kRing x one_shot_bytes
//   staging, 2 halves         each: input area (piece_bytes), result area (piece_bytes / 2)
//
// Each field has one writer, the owner of the segment. The exception is `SharedState`: all local
// ranks write it, and only that of local rank 0 is used. Fresh memory is zero, which is the right
// start value of every counter.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../os/first_record.h"
#include "../os/futex.h"
#include "../os/limits.h"
#include "types.h"

namespace ddpx::shm {

constexpr std::size_t kLine = 64;  // size of a cache line
constexpr uint32_t kLayoutVersion = 5;
constexpr std::size_t kTokenBytes = 32;

// A rank can be one operation ahead of another rank (see steps.h), so two would be enough.
constexpr std::size_t kRing = 4;

// Machines with more cores count them modulo this number.
constexpr std::size_t kCores = 256;

// A buffer in an arena segment of the descriptor's rank. Segment 0 means private memory.
struct BufferRef {
  uint32_t segment = 0;
  uint64_t offset = 0;
};

// The operation that one rank has called. The rank writes it before it arrives at the first step of
// the operation; other ranks read it after that step.
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
  os::Word count;     // arrivals of all ranks at all steps
  os::Word sleepers;  // ranks that sleep on `count`, or are about to
  os::Word num_left;  // ranks that have left the group
};

struct FailureRecord {
  int32_t kind;
  int32_t culprit;
  char text[500];
};

using FirstFailure = os::FirstRecord<FailureRecord>;

struct SharedState {
  StepCounter steps;
  std::atomic<int32_t> arrived_on_core[kCores];  // local rank of the last arrival, plus 1
  alignas(kLine) FirstFailure failure;
  std::atomic<uint64_t> reserved_bytes;  // see `create_memory`
};

struct Home {
  uint32_t version;
  uint64_t one_shot_bytes;
  uint64_t piece_bytes;
  char token[kTokenBytes];  // random, and different for each rank
  os::CpuLimits cpu_limits;
  alignas(kLine) std::atomic<bool> has_left;  // the owner has left the group
  alignas(kLine) os::Word steps;              // number of steps at which the owner has arrived
  std::atomic<int32_t> core;                  // CPU of the owner's last arrival
  alignas(kLine) Descriptor ring[kRing];      // indexed by sequence number modulo kRing
  SharedState shared;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace ddpx::shm
