#include <chrono>
#include <string>
#include <utility>

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "../shm_backend/shm_backend.h"
#include "bindings.h"
#include "no_gil_on_release.h"

namespace py = pybind11;

namespace ddpx::bindings {

void bind_shm(py::module_& module) {
  py::enum_<shm::Order>(module, "ShmOrder")
      .value("GLOO", shm::Order::kGloo)
      .value("FIXED", shm::Order::kFixed);

  // torch binds the base class. pybind11 must know it before the derived class.
  py::module_::import("torch._C._distributed_c10d");
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<ShmBackend, NoGilIntrusive<ShmBackend>, c10d::Backend>(module, "ShmBackend")
      .def(
          py::init([](c10::intrusive_ptr<c10d::Store> store,
                      int rank,
                      int size,
                      std::chrono::milliseconds timeout,
                      c10::intrusive_ptr<c10d::Backend> inner,
                      shm::Order order,
                      std::string host_identity,
                      std::vector<int> in_job) {
            shm::GroupOptions options;
            options.order = order;
            options.timeout = timeout;
            options.host_identity = std::move(host_identity);
            options.in_job = std::move(in_job);
            return c10::make_intrusive<ShmBackend>(
                std::move(store), rank, size, std::move(options), std::move(inner));
          }),
          py::arg("store").none(false),
          py::arg("rank"),
          py::arg("size"),
          py::arg("timeout"),
          py::arg("inner").none(false),
          py::arg("order"),
          py::arg("host_identity"),
          py::arg("in_job"),
          NoGil())
      .def(
          "set_lane", &ShmBackend::set_lane, py::arg("index"), py::arg("lane").none(false), NoGil())
      .def_property_readonly("lanes", &ShmBackend::lanes)
      .def_property_readonly(
          "hosts", [](const ShmBackend& backend) { return backend.topology().hosts; })
      .def_property_readonly("order", &ShmBackend::order)
      .def("set_timeout", &ShmBackend::setTimeout, py::arg("timeout"))
      .def_property_readonly("timeout", &ShmBackend::timeout)
      .def_property_readonly("resident_bytes", &ShmBackend::resident_bytes);
}

}  // namespace ddpx::bindings
