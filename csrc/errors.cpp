#include "errors.h"

namespace ddpx {

InternalError::InternalError(const std::string& what)
    : std::logic_error("ddpx internal error (this is a bug in ddpx; please report it): " + what) {}

}  // namespace ddpx
