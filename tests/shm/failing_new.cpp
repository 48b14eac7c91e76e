// Replaces `operator new` in the whole test program.
#include "failing_new.h"

#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

struct Plan {
  bool active = false;
  bool all_from = false;
  bool happened = false;
  long left = 0;  // number of allocations up to the one that fails
};

thread_local Plan plan;

bool shall_fail() {
  if (!plan.active || --plan.left > 0 || (plan.happened && !plan.all_from)) {
    return false;
  }
  return plan.happened = true;
}

void* allocate(std::size_t num_bytes) {
  void* memory = shall_fail() ? nullptr : std::malloc(num_bytes == 0 ? 1 : num_bytes);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

void* allocate(std::size_t num_bytes, std::align_val_t alignment) {
  const auto multiple = static_cast<std::size_t>(alignment);
  void* memory =
      shall_fail() ? nullptr
                   : std::aligned_alloc(multiple, (num_bytes + multiple - 1) / multiple * multiple);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

}  // namespace

void* operator new(std::size_t num_bytes) {
  return allocate(num_bytes);
}
void* operator new[](std::size_t num_bytes) {
  return allocate(num_bytes);
}
void* operator new(std::size_t num_bytes, const std::nothrow_t&) noexcept {
  return shall_fail() ? nullptr : std::malloc(num_bytes == 0 ? 1 : num_bytes);
}
void* operator new[](std::size_t num_bytes, const std::nothrow_t&) noexcept {
  return shall_fail() ? nullptr : std::malloc(num_bytes == 0 ? 1 : num_bytes);
}
void* operator new(std::size_t num_bytes, std::align_val_t alignment) {
  return allocate(num_bytes, alignment);
}
void* operator new[](std::size_t num_bytes, std::align_val_t alignment) {
  return allocate(num_bytes, alignment);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete[](void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace ddpx::shm {

FailingNew::FailingNew(long nth, Which which) {
  plan = {true, which == Which::kAllFrom, false, nth};
}

FailingNew::~FailingNew() {
  plan.active = false;
}

bool FailingNew::happened() const {
  return plan.happened;
}

}  // namespace ddpx::shm
