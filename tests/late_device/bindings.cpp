#include <pybind11/chrono.h>
#include <torch/extension.h>

#include <chrono>

#include "guard.h"
#include "ignored_waits.h"
#include "kernels.h"
#include "memory.h"
#include "process_group.h"
#include "streams.h"

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  module.def("register_device", &late::register_device);
  module.def("set_capturing", &late::set_capturing);
  module.def("set_lateness", [](double hold_ms, double delay_us, uint64_t seed) {
    late::set_lateness(
        {std::chrono::milliseconds(static_cast<int64_t>(hold_ms)),
         std::chrono::microseconds(static_cast<int64_t>(delay_us)),
         seed});
  });
  module.def("synchronize", &late::synchronize, NoGil());
  module.def("current_device", [] { return static_cast<int>(late::current_device()); });
  module.def("set_device", [](int device) {
    late::set_current_device(static_cast<c10::DeviceIndex>(device));
  });
  module.def("ignore_waits_from", &late::ignore_waits_from);
  module.def("num_ignored", &late::num_ignored);
  module.def("reset_costs", &late::reset_costs);
  module.def("costs", [] {
    const auto costs = late::costs();
    return py::make_tuple(costs.num_operations, costs.num_bytes);
  });
  py::module_::import("torch._C._distributed_c10d");
  py::class_<late::LateBackend, c10::intrusive_ptr<late::LateBackend>, c10d::Backend>(
      module, "LateBackend")
      .def(
          py::init([](int rank, int size, c10::intrusive_ptr<c10d::Backend> inner) {
            return c10::make_intrusive<late::LateBackend>(rank, size, std::move(inner));
          }),
          py::arg("rank"),
          py::arg("size"),
          py::arg("inner"));
}
