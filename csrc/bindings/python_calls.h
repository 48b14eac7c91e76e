// Calls of Python functions from C++ code that does not hold the GIL, and their errors.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include <torch/csrc/utils/pybind.h>

namespace ddpx::bindings {

// Throws the error that the interpreter has set. Autograd's engine keeps its type.
[[noreturn]] void throw_python_error();
[[noreturn]] void throw_again(pybind11::error_already_set& error);

// Wraps a Python function so that it may be called, and destroyed, without the GIL.
std::function<void()> with_gil(pybind11::function callback);

// Returns the text of the error that the work raises.
std::optional<std::string> attempt(const std::function<void()>& work);

}  // namespace ddpx::bindings
