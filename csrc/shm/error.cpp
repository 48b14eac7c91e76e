#include "error.h"

namespace ddpx::shm {

std::string opening(const std::string& name, const std::string& phase) {
  return "[ddpx shm " + name + ", phase " + phase + "] ";
}

std::string without_opening(const std::string& text) {
  const auto end = text.find("] ");
  return text.rfind("[ddpx shm", 0) == 0 && end != std::string::npos ? text.substr(end + 2) : text;
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& cause) {
    return cause.what();
  } catch (...) {
    return "an unknown error";
  }
}

Error from_os(const os::Error& error) {
  const auto text = std::string("[ddpx shm] ") + error.what();
  return dynamic_cast<const os::OutOfMemory*>(&error) == nullptr
             ? Error(ErrorKind::kSystem, text)
             : Error(
                   ErrorKind::kOutOfMemory,
                   text +
                       ". Reduce the number of ranks on this host or the size of the model, raise "
                       "the memory limit of the container, or use the gloo backend.");
}

}  // namespace ddpx::shm
