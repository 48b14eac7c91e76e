#include "ignored_waits.h"

#include <c10/util/Backtrace.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>

namespace late {
namespace {

constexpr int kMaxFrames = 24;

std::mutex mutex;
std::string ignored;
std::atomic<bool> any{false};
std::atomic<int> count{0};

std::string name_of(void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_sname == nullptr) {
    return "";
  }
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status), std::free);
  return status == 0 ? name.get() : info.dli_sname;
}

}  // namespace

void ignore_waits_from(const std::string& function) {
  const std::lock_guard<std::mutex> lock(mutex);
  ignored = function;
  any = !function.empty();
  count = 0;
}

bool is_ignored() {
  if (!any) {
    return false;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  std::array<void*, kMaxFrames> frames{};
  const int num_frames = backtrace(frames.data(), kMaxFrames);
  for (int i = 0; i < num_frames; ++i) {
    if (name_of(frames[static_cast<std::size_t>(i)]).find(ignored) != std::string::npos) {
      ++count;
      return true;
    }
  }
  return false;
}

int num_ignored() {
  return count;
}

}  // namespace late
