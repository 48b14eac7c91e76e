#include "introduction.h"

#include <unistd.h>

#include <array>
#include <functional>
#include <random>

#include "fields.h"
#include "shared_text.h"

namespace ddpx::health {
namespace {

constexpr std::size_t kMostOfHost = 96;

}  // namespace

std::string Introduction::to_text() const {
  return join_fields(
      {std::to_string(rank),
       host,
       process.machine,
       std::to_string(process.pid),
       std::to_string(process.start_time),
       std::to_string(page_fd),
       std::to_string(token)});
}

std::optional<Introduction> Introduction::from_text(const std::string& text) {
  const auto fields = split_fields(text);
  if (fields.size() != 7) {
    return std::nullopt;
  }
  const auto rank = to_number<int>(fields[0]);
  const auto pid = to_number<pid_t>(fields[3]);
  const auto start_time = to_number<uint64_t>(fields[4]);
  const auto page_fd = to_number<int>(fields[5]);
  const auto token = to_number<uint64_t>(fields[6]);
  if (!rank || !pid || !start_time || !page_fd || !token) {
    return std::nullopt;
  }
  return Introduction{*rank, fields[1], {fields[2], *pid, *start_time}, *page_fd, *token};
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
