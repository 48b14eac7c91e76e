#include <torch/csrc/utils/pybind.h>

#include "../comm/collective.h"
#include "bindings.h"

namespace py = pybind11;

namespace ddpx::bindings {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

void bind_collective(py::module_& module) {
  module.def(
      "needs_abort_polling",
      [](const Group& process_group, const c10::Device& device) {
        return needs_abort_polling(*process_group, device.type());
      },
      py::arg("process_group").none(false),
      py::arg("device").none(false));
  module.def(
      "wait",
      [](const Collective::Work& work, const Group& process_group, const c10::Device& device) {
        const auto collective = make_collective(process_group);
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
