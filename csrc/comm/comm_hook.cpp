#include "comm_hook.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace ddpx {
namespace {

// torch keeps only the text of such an error: these words, the name of the type, and the message.
constexpr std::string_view kOfCallback = "Got the following error when running the callback: ";

// torch raises no error of these types for a failed collective call. A type of another name may be
// a subclass of RuntimeError.
constexpr std::array<std::string_view, 13> kNeverOfCall = {
    "ArithmeticError",
    "AssertionError",
    "AttributeError",
    "ImportError",
    "IndexError",
    "KeyError",
    "LookupError",
    "MemoryError",
    "NameError",
    "StopIteration",
    "TypeError",
    "ValueError",
    "ZeroDivisionError",
};

}  // namespace

void throw_if_of_callback(const std::runtime_error& error) {
  const std::string_view text = error.what();
  // A callback that reads a failed future raises an error with the text of that future.
  const auto last = text.rfind(kOfCallback);
  if (text.rfind(kOfCallback, 0) != 0) {
    return;
  }
  const auto type = text.substr(last + kOfCallback.size());
  const auto name = type.substr(0, type.find_first_of(":\n"));
  const bool own = std::find(kNeverOfCall.begin(), kNeverOfCall.end(), name) != kNeverOfCall.end();
  throw HookError(error.what(), !own);
}

}  // namespace ddpx
