#include <torch/csrc/utils/pybind.h>

#include "../comm/collective.h"
#include "bindings.h"

namespace py = pybind11;

namespace ddpx::bindings {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

WrittenIn language_of(const Group& group) {
  const py::gil_scoped_acquire gil;
  const auto native = py::type::of<c10d::ProcessGroup>();
  return py::type::of(py::cast(group)).is(native) ? WrittenIn::kCpp : WrittenIn::kPython;
}

void bind_collective(py::module_& module) {
  module.def(
      "needs_abort_polling",
      [](const Group& process_group, const c10::Device& device) {
        return language_of(process_group) == WrittenIn::kCpp &&
               needs_abort_polling(*process_group, device.type());
      },
      py::arg("process_group").none(false),
      py::arg("device").none(false));
  module.def(
      "wait",
      [](const Collective::Work& work, const Group& process_group, const c10::Device& device) {
        const auto collective = make_collective(process_group, language_of(process_group));
        try {
          collective->wait(*work, device);
        } catch (const health::GroupFailed&) {
          collective->monitor()->raise_if_failed();
          throw;
        }
      },
      py::arg("work").none(false),
      py::arg("process_group").none(false),
      py::arg("device").none(false),
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace ddpx::bindings
