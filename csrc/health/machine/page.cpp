#include "page.h"

namespace ddpx::health {

std::shared_ptr<StatusPage> map_page(int fd, int world_size) {
  const auto mapping = os::map_shared(fd, os::PageTable::kAtAccess);
  return mapping->num_bytes() < StatusPage::num_bytes(world_size)
             ? nullptr
             : std::shared_ptr<StatusPage>(mapping, reinterpret_cast<StatusPage*>(mapping->data()));
}

OwnPage::OwnPage(uint64_t token, int world_size)
    : fd_(os::create_memory(
          os::round_up(StatusPage::num_bytes(world_size), os::page_bytes()),
          "the status page of a rank")),
      page_(map_page(fd_.get(), world_size)) {
  page_->token.store(token, std::memory_order_relaxed);
  publish({.doing = Doing::kOutside, .model = kNoModel});
}

void OwnPage::publish(Activity activity) {
  const auto before = page_->activity();
  const bool goes_on = activity.doing == Doing::kBackward && before.doing == activity.doing &&
                       before.model == activity.model && before.step == activity.step;
  activity.since_ns = goes_on ? before.since_ns : now_ns();
  page_->current.store(activity);
}

void OwnPage::begin_construction() {
  const auto number = ++num_constructions_;
  publish({.doing = Doing::kConstructing, .model = kNoModel, .step = number});
}

// A rank that has begun fewer calls than another rank is behind that rank.
void OwnPage::begin_call() {
  auto activity = page_->activity();
  if (activity.doing == Doing::kConstructing) {
    activity.doing = Doing::kConstruction;
    ++activity.bucket;
    publish(activity);
  }
}

void OwnPage::end_call() {
  if (page_->activity().doing == Doing::kConstruction) {
    publish(Doing::kConstructing);
  }
}

void OwnPage::publish(Doing doing) {
  auto activity = page_->activity();
  activity.doing = doing;
  if (doing == Doing::kBuffers) {
    ++page_->num_syncs;
  }
  publish(activity);
}

void OwnPage::publish_fault(Fault fault, const std::string& text) {
  page_->fault_text.write(text.substr(0, text.find('\n')));
  auto faulty = page_->activity();
  faulty.since_ns = now_ns();
  page_->faulty.store(faulty);
  page_->fault.store(fault, std::memory_order_release);
}

void OwnPage::go_on() {
  if (page_->fault.load(std::memory_order_relaxed) != Fault::kNone) {
    page_->fault.store(Fault::kNone, std::memory_order_relaxed);
  }
}

void OwnPage::end_as(Presence presence) {
  auto there = Presence::kThere;
  page_->state.compare_exchange_strong(there, presence);
}

void OwnPage::fail(const std::string& cause, bool blames_peer) {
  if (page_->presence() == Presence::kFailing) {
    return;
  }
  page_->blames_peer.store(blames_peer, std::memory_order_relaxed);
  page_->cause.write(cause);
  page_->state.store(Presence::kFailing, std::memory_order_release);
}

}  // namespace ddpx::health
