#include "gloo_faults.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "../shm/error.h"
#include "shm_work.h"

namespace ddpx {
namespace {

// gloo may see the end of a connection before the kernel has ended the process.
constexpr auto kTimeToSee = std::chrono::seconds(2);
constexpr auto kBetweenLooks = std::chrono::milliseconds(20);

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& cause) {
    return cause.what();
  } catch (...) {
    return "an unknown error";
  }
}

std::string describe(const std::vector<shm::Loss>& losses) {
  std::string text;
  for (const auto& loss : losses) {
    text += (text.empty() ? "" : ", ") + shm::list_ranks({loss.rank}) + " " + loss.what;
  }
  return text;
}

}  // namespace

GlooFaults::GlooFaults(
    const std::shared_ptr<shm::Group>& group, int rank, const GlooCall& call, bool single_host)
    : group_(group), rank_(rank), call_(call), single_host_(single_host) {}

std::exception_ptr GlooFaults::explain(std::exception_ptr error) const {
  const auto group = group_.lock();
  if (!group) {
    return error;
  }
  if (!single_host_) {
    const auto failure = call_.collective ? group_failure() : nullptr;
    return failure ? failure : error;
  }
  const auto said = text_of(error);
  const auto deadline = std::chrono::steady_clock::now() + kTimeToSee;
  while (true) {
    if (const auto found = reason(*group, said)) {
      return as_torch_error(std::make_exception_ptr(*found));
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      return error;
    }
    std::this_thread::sleep_for(kBetweenLooks);
  }
}

// Nothing if nobody is gone that the operation needed.
std::optional<shm::Error> GlooFaults::reason(shm::Group& group, const std::string& said) const {
  if (call_.collective) {
    // A rank that is gone may have gone because of another one, which the first to notice named.
    if (auto failure = group.failure(phase())) {
      return failure;
    }
  }
  const auto losses = group.losses();
  const bool needed = std::any_of(losses.begin(), losses.end(), [this](const shm::Loss& loss) {
    return loss.rank == call_.partner.value_or(loss.rank);
  });
  if (!needed) {
    return std::nullopt;
  }
  const shm::Failure failure{
      shm::ErrorKind::kPeerLost,
      describe(losses) + ", and was needed in " + phase() +
          ". See that rank's output; the group cannot go on, start the job again. gloo said: " +
          said,
      losses.front().rank};
  // Two ranks that live can go on sending to each other.
  return call_.collective ? group.fail(failure, phase())
                          : shm::Error(failure.kind, shm::opening(rank_, phase()) + failure.text);
}

std::exception_ptr GlooFaults::group_failure() const {
  const auto group = group_.lock();
  const auto failure = group ? group->failure(phase()) : std::nullopt;
  return failure ? as_torch_error(std::make_exception_ptr(*failure)) : nullptr;
}

std::string GlooFaults::phase() const {
  return std::string(call_.name) + " through gloo";
}

}  // namespace ddpx
