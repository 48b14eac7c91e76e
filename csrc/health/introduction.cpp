#include "introduction.h"

#include <unistd.h>

#include <array>
#include <random>
#include <sstream>

namespace ddpx::health {

std::string Introduction::to_text() const {
  std::ostringstream out;
  out << host << '\n'
      << process.machine << '\n'
      << process.pid << ' ' << process.start_time << ' ' << page_fd << ' ' << token;
  return out.str();
}

std::optional<Introduction> Introduction::from_text(const std::string& text) {
  std::istringstream in(text);
  Introduction found;
  std::getline(in, found.host);
  std::getline(in, found.process.machine);
  in >> found.process.pid >> found.process.start_time >> found.page_fd >> found.token;
  return in ? std::make_optional(found) : std::nullopt;
}

Introduction Introduction::own(const std::string& identity, int page_fd, uint64_t token) {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  Introduction own{host.data(), this_process(), page_fd, token};
  if (!identity.empty()) {
    own.host += "/" + identity;
    own.process.machine += " " + identity;
  }
  return own;
}

uint64_t new_token() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

}  // namespace ddpx::health
