#include "python_calls.h"

#include <memory>
#include <utility>

#include <torch/csrc/Exceptions.h>

namespace py = pybind11;

namespace ddpx::bindings {

void throw_python_error() {
  python_error thrown;
  thrown.persist();  // gives what() a text
  throw thrown;
}

void throw_again(py::error_already_set& error) {
  error.restore();
  throw_python_error();
}

std::function<void()> with_gil(py::function callback) {
  const auto drop = [](py::function* function) {
    if (Py_IsInitialized() == 0) {
      return;  // the interpreter ends, and other threads cannot take the GIL any more
    }
    const py::gil_scoped_acquire gil;
    delete function;
  };
  std::shared_ptr<py::function> held(new py::function(std::move(callback)), drop);
  return [held] {
    const py::gil_scoped_acquire gil;
    try {
      (*held)();
    } catch (py::error_already_set& error) {
      throw_again(error);
    }
  };
}

std::optional<std::string> attempt(const std::function<void()>& work) {
  try {
    work();
    return std::nullopt;
  } catch (python_error& error) {
    error.persist();  // takes the error from the interpreter
    return error.what();
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace ddpx::bindings
