#include "users_hook.h"

#include <string>
#include <utility>

#include <torch/csrc/distributed/c10d/python_comm_hook.h>

#include "../errors.h"
#include "python_calls.h"

namespace py = pybind11;

namespace ddpx::bindings {
namespace {

// torch's class turns None into a null pointer and dereferences it.
py::cpp_function returning_a_future(py::object hook) {
  const py::object future = py::module_::import("torch._C").attr("Future");
  return [hook = std::move(hook), future](const py::object& state, const py::object& bucket) {
    py::object result = hook(state, bucket);
    if (!py::isinstance(result, future)) {
      throw UserError(
          "Communication hook: callback must return a torch.futures.Future object, but got " +
          py::str(py::type::of(result).attr("__name__")).cast<std::string>() +
          ". Return the future of a collective call, with .then() to select the tensor, or return "
          "a torch.futures.Future whose result is set.");
    }
    return result;
  };
}

// An error of the user's hook whose type is not RuntimeError. The script gets the same object.
class PythonHookError final : public HookError {
 public:
  PythonHookError(const py::error_already_set& error, bool may_be_of_call)
      : HookError(error.what(), may_be_of_call), error_(error) {}

  void raise_own(const std::string& note) const override {
    const py::gil_scoped_acquire gil;
    try {
      const char* name = "__notes__";  // Python 3.11 and later print them
      py::list notes = py::getattr(error_.value(), name, py::list());
      notes.append(note);
      py::setattr(error_.value(), name, notes);
    } catch (const py::error_already_set&) {
      // the error takes no notes
    }
    auto error = error_;
    throw_again(error);
  }

 private:
  py::error_already_set error_;
};

// Needs the GIL.
[[noreturn]] void throw_hook_error(const py::error_already_set& error, bool may_be_of_call) {
  if (error.type().ptr() == PyExc_RuntimeError) {
    throw HookError(error.what(), may_be_of_call);
  }
  throw PythonHookError(error, may_be_of_call);
}

// Turns errors of the hook into HookError.
class UsersHook final : public c10d::PythonCommHook {
 public:
  using PythonCommHook::PythonCommHook;

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    try {
      return PythonCommHook::runHook(bucket);
    } catch (const py::error_already_set& error) {
      const py::gil_scoped_acquire gil;
      // A RuntimeError may come from the collective calls of the hook.
      throw_hook_error(error, error.matches(PyExc_RuntimeError));
    }
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    if (result.isPyObject()) {
      const py::gil_scoped_acquire gil;
      auto* value = result.toPyObjectHolder()->getPyObject();
      if (PyExceptionInstance_Check(value)) {  // the script has called set_exception()
        PyErr_SetObject(PyExceptionInstance_Class(value), value);
        // A callback may have caught the error of a collective call, and set an error of its own.
        throw_hook_error(py::error_already_set(), /*may_be_of_call=*/true);
      }
    }
    return PythonCommHook::parseHookResult(result);
  }
};

}  // namespace

std::shared_ptr<CommHook> make_users_hook(py::object state, py::object hook) {
  return std::make_shared<UsersHook>(std::move(state), returning_a_future(std::move(hook)));
}

}  // namespace ddpx::bindings
