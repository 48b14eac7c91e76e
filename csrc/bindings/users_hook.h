// A communication hook that the user wrote in Python.
#pragma once

#include <memory>

#include <torch/csrc/utils/pybind.h>

#include "../comm/comm_hook.h"

namespace ddpx::bindings {

// The hook raises HookError in place of its own errors. Takes the GIL when it is called.
std::shared_ptr<CommHook> make_users_hook(pybind11::object state, pybind11::object hook);

}  // namespace ddpx::bindings
