#include "introduction.h"

#include <unistd.h>

#include <array>
#include <functional>
#include <random>

#include "record.h"
#include "shared_text.h"

namespace ddpx::health {
namespace {

constexpr std::size_t kMostOfHost = 96;

}  // namespace

std::string Introduction::encode() const {
  return health::encode(
      rank, host, process.machine, process.pid, process.start_time, page_fd, token);
}

std::optional<Introduction> Introduction::decode(std::string_view record) {
  Introduction who;
  const bool is_whole = health::decode(
      record,
      who.rank,
      who.host,
      who.process.machine,
      who.process.pid,
      who.process.start_time,
      who.page_fd,
      who.token);
  return is_whole && who.token != 0 ? std::make_optional(who) : std::nullopt;
}

Introduction Introduction::own(int rank, const std::string& identity, int page_fd, uint64_t token) {
  std::array<char, 65> host{};
  gethostname(host.data(), host.size() - 1);
  Introduction own{rank, host.data(), os::this_process(), page_fd, token};
  if (!identity.empty()) {
    auto& machine = own.process.machine;
    machine = std::to_string(std::hash<std::string>()(machine + " " + identity));
    own.host += "/" + identity;
  }
  own.host.resize(cut_utf8(own.host, kMostOfHost));  // see kMostBytes
  return own;
}

uint64_t new_token() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

}  // namespace ddpx::health
