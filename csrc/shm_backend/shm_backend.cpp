#include "shm_backend.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <utility>

#include "../health_c10d/store_text.h"
#include "../shm/channel.h"
#include "../shm/error.h"

namespace ddpx {
namespace {

// torch's Store as the channel of the rendezvous. Lives on the stack of ShmBackend's constructor;
// the constructing thread uses it. Needs no lock.
class StoreChannel final : public shm::Channel {
 public:
  explicit StoreChannel(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    store_->set(key, to_bytes(value));
  }
  void append(const std::string& key, const std::string& value) override {
    append_text(*store_, key, value);
  }
  int64_t count_up(const std::string& key) override {
    return store_->add(key, 1);
  }
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    store_->wait({key}, timeout);
    return to_text(store_->get(key));
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

int64_t checked_timeout_ms(std::chrono::milliseconds timeout) {
  TORCH_CHECK(
      timeout.count() > 0,
      "[ddpx shm] the timeout of a group must be at least 1 ms, but is ",
      timeout.count(),
      " ms. Pass a longer timeout.");
  return timeout.count();
}

}  // namespace

ShmBackend::ShmBackend(
    c10::intrusive_ptr<c10d::Store> store,
    int rank,
    int size,
    shm::GroupOptions options,
    c10::intrusive_ptr<c10d::Backend> inner)
    : WatchedBackend(rank, size),
      arena_(std::make_shared<shm::Arena>()),
      order_(options.order),
      inner_(std::move(inner)),
      timeout_ms_(checked_timeout_ms(options.timeout)) {
  options.rendezvous_timeout = std::min(options.rendezvous_timeout, options.timeout);
  const auto make_group = [&](const c10::intrusive_ptr<c10d::Store>& of_group) {
    StoreChannel channel(of_group);
    return std::make_shared<shm::Group>(channel, rank, size, options, arena_);
  };
  group_ = make_group(store);
  topology_ = group_->topology();
  if (!single_host()) {
    auto passing = make_group(c10::make_intrusive<c10d::PrefixStore>("passing", store));
    between_hosts_ = std::make_shared<BetweenHosts>(group_, std::move(passing), rank);
  }
}

ShmBackend::~ShmBackend() {
  if (between_hosts_) {
    between_hosts_->close();
  }
}

void ShmBackend::set_lane(std::size_t index, BetweenHosts::Lane lane) {
  between_hosts()->set_lane(index, std::move(lane));
}

// ---- memory ------------------------------------------------------------------------------------

// The index of a CPU device is negative.
bool ShmBackend::supportsTensorAlloc(c10::DeviceIndex device_index) {
  return device_index < 0 && topology_.local_ranks(rank_).size() > 1;
}

at::Tensor ShmBackend::allocateTensor(long numel, at::TensorOptions options) {
  TORCH_CHECK(
      options.device().is_cpu(),
      "the shm backend allocates tensors on CPU only, but got device ",
      options.device());
  // Every error fails the group: otherwise peers with enough memory would wait for this rank in
  // their next operation.
  try {
    return allocate(numel, options);
  } catch (const shm::Error&) {
    throw;  // allocate() has failed the group
  } catch (...) {
    std::rethrow_exception(fail_with_current_exception("allocation"));
  }
}

at::Tensor ShmBackend::allocate(long numel, const at::TensorOptions& options) {
  const auto num_bytes = static_cast<std::size_t>(numel) * options.dtype().itemsize();
  try {
    std::shared_ptr<void> block(
        arena_->allocate(std::max<std::size_t>(num_bytes, 1)),
        [arena = arena_](void* memory) { arena->free(memory); });
    auto* data = block.get();
    return at::from_blob(
        data, {numel}, [block = std::move(block)](void*) mutable { block.reset(); }, options);
  } catch (const shm::Error& error) {
    const auto text = topology_.name({rank_}) + ": " + shm::without_opening(error.what());
    const shm::Failure failure{error.kind(), text, rank_};
    if (!single_host()) {
      between_hosts()->fail(failure);
    }
    throw group()->fail(failure, "allocation");
  }
}

std::size_t ShmBackend::resident_bytes() const {
  return arena_->resident_bytes();
}

// ---- the group ---------------------------------------------------------------------------------

std::exception_ptr ShmBackend::fail_with_current_exception(const char* phase) {
  const auto error = as_torch_error(group()->fail_with_current_exception(phase));
  if (!single_host()) {
    between_hosts()->fail_with(error);
  }
  return error;
}

void ShmBackend::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ms_ = checked_timeout_ms(timeout);
  inner()->setTimeout(timeout);
}

void ShmBackend::setSequenceNumberForGroup() {}  // nothing to set: all ranks count from 0

uint64_t ShmBackend::getSequenceNumberForGroup() {
  return sequence_;
}

// The failure detector aborts a group whose ranks are lost. The detector's report then becomes the
// failure of the group.
void ShmBackend::abort() {
  const auto local = group();
  const auto watching = monitor();
  if (const auto report = watching ? watching->report() : std::nullopt) {
    local->fail(
        {shm::ErrorKind::kPeerLost,
         shm::without_opening(report->text()),
         report->failure.first_rank()},
        "abort");
  } else {
    local->abort("the process group was aborted");
  }
  const auto failure = local->failure("abort");
  if (!single_host() && failure) {
    between_hosts()->fail_with(std::make_exception_ptr(*failure));
  }
  inner()->abort();
}

void ShmBackend::shutdown() {
  std::shared_ptr<shm::Group> group;
  std::shared_ptr<BetweenHosts> between_hosts;
  c10::intrusive_ptr<c10d::Backend> inner;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::swap(group, group_);
    std::swap(between_hosts, between_hosts_);
    std::swap(inner, inner_);
  }
  // The lock must be free here: these calls wait for threads that may need it.
  if (between_hosts) {
    between_hosts->close();
  }
  if (group) {
    group->leave();
  }
  if (inner) {
    inner->shutdown();
  }
}

}  // namespace ddpx
