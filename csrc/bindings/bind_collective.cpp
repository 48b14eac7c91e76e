#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <vector>

#include "../buckets/grad_values.h"
#include "../comm/collective.h"
#include "../health_c10d/group_monitor.h"
#include "bindings.h"

namespace py = pybind11;

namespace ddpx::bindings {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

WrittenIn language_of(const Group& group) {
  const py::gil_scoped_acquire gil;
  const auto native = py::type::of<c10d::ProcessGroup>();
  return py::type::of(py::cast(group)).is(native) ? WrittenIn::kCpp : WrittenIn::kPython;
}

namespace {

// The dtypes that every backend can send.
bool is_common(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kComplexFloat:
    case at::kComplexDouble:
    case at::kBool:
    case at::kByte:
    case at::kChar:
    case at::kInt:
    case at::kLong:
      return true;
    default:
      return false;
  }
}

bool holds_plain_values(const at::Tensor& tensor) {
  return holds_values(tensor) && !tensor.is_meta() && !tensor.is_inference() &&
         is_common(tensor.scalar_type()) && tensor.is_non_overlapping_and_dense();
}

}  // namespace

void bind_collective(py::module_& module) {
  module.def(
      "needs_abort_polling",
      [](const Group& process_group, const c10::Device& device) {
        return language_of(process_group) == WrittenIn::kCpp &&
               needs_abort_polling(*process_group, device.type());
      },
      py::arg("process_group").none(false),
      py::arg("device").none(false));
  module.def("holds_plain_values", &holds_plain_values, py::arg("tensor"));
  module.def(
      "hold_plain_values",
      [](const std::vector<at::Tensor>& tensors) {
        return std::all_of(tensors.begin(), tensors.end(), holds_plain_values);
      },
      py::arg("tensors"));
  module.def(
      "wait",
      [](const Collective::Work& work, const Group& process_group, const c10::Device& device) {
        const auto collective = make_collective(process_group, language_of(process_group));
        try {
          collective->wait(*work, device);
        } catch (const health::GroupFailed&) {
          if (const auto monitor = monitor_of(process_group)) {
            monitor->raise_if_failed();
          }
          throw;
        }
      },
      py::arg("work").none(false),
      py::arg("process_group").none(false),
      py::arg("device").none(false),
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace ddpx::bindings
