#include "ignored.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>

namespace late {
namespace {

struct Rule {
  Wait kind;
  std::vector<std::string> callers;
  int64_t num_applied = 0;
};

struct Rules {
  std::atomic<bool> any{false};
  std::mutex mutex;
  std::vector<Rule> rules;
};

Rules& the_rules() {
  static auto* const instance = new Rules;
  return *instance;
}

std::vector<std::string> callers() {
  std::array<void*, 64> frames{};
  const int num_frames = backtrace(frames.data(), static_cast<int>(frames.size()));
  std::vector<std::string> names;
  for (int i = 0; i < num_frames; ++i) {
    Dl_info info{};
    if (dladdr(frames[static_cast<std::size_t>(i)], &info) == 0 || info.dli_sname == nullptr) {
      continue;
    }
    int status = 0;
    char* demangled = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
    names.emplace_back(status == 0 ? demangled : info.dli_sname);
    std::free(demangled);
  }
  return names;
}

bool on_stack(const std::string& part, const std::vector<std::string>& names) {
  return std::any_of(names.begin(), names.end(), [&](const std::string& name) {
    return name.find(part) != std::string::npos;
  });
}

bool applies(const Rule& rule, const std::vector<std::string>& names) {
  return std::all_of(rule.callers.begin(), rule.callers.end(), [&](const std::string& part) {
    return part.front() == '!' ? !on_stack(part.substr(1), names) : on_stack(part, names);
  });
}

}  // namespace

int64_t ignore(Wait kind, std::vector<std::string> callers) {
  auto& r = the_rules();
  const std::lock_guard<std::mutex> lock(r.mutex);
  r.rules.push_back({kind, std::move(callers)});
  r.any = true;
  return static_cast<int64_t>(r.rules.size()) - 1;
}

void stop_ignoring() {
  auto& r = the_rules();
  const std::lock_guard<std::mutex> lock(r.mutex);
  r.rules.clear();
  r.any = false;
}

int64_t num_ignored(int64_t rule) {
  auto& r = the_rules();
  const std::lock_guard<std::mutex> lock(r.mutex);
  return r.rules.at(static_cast<std::size_t>(rule)).num_applied;
}

bool ignored(Wait kind) {
  auto& r = the_rules();
  if (!r.any) {
    return false;
  }
  const auto names = callers();
  const std::lock_guard<std::mutex> lock(r.mutex);
  bool found = false;
  for (auto& rule : r.rules) {
    if (rule.kind == kind && applies(rule, names)) {
      ++rule.num_applied;
      found = true;
    }
  }
  return found;
}

}  // namespace late
