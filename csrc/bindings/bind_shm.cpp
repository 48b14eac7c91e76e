#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "../shm_backend/shm_backend.h"
#include "bindings.h"

namespace py = pybind11;

namespace {

// Lets go of the GIL when it lets go of the backend, which waits for threads then, and these may
// need it to release a tensor that Python has seen. As torch does it for its own backends.
template <class T>
class NoGilOnRelease {
 public:
  NoGilOnRelease() = default;
  explicit NoGilOnRelease(T* raw) : held_(c10::intrusive_ptr<T>::unsafe_steal_from_new(raw)) {}
  NoGilOnRelease(c10::intrusive_ptr<T> held) : held_(std::move(held)) {}  // NOLINT: implicit
  NoGilOnRelease(const NoGilOnRelease&) = default;
  NoGilOnRelease(NoGilOnRelease&&) noexcept = default;
  NoGilOnRelease& operator=(const NoGilOnRelease&) = default;
  NoGilOnRelease& operator=(NoGilOnRelease&&) noexcept = default;

  ~NoGilOnRelease() {
    if (held_ && PyGILState_Check()) {
      const py::gil_scoped_release no_gil;
      held_.reset();
    }
  }

  T* get() const {
    return held_.get();
  }

 private:
  c10::intrusive_ptr<T> held_;
};

}  // namespace

PYBIND11_DECLARE_HOLDER_TYPE(T, NoGilOnRelease<T>, true)

namespace ddpx::bindings {

void bind_shm(py::module_& module) {
  py::enum_<shm::Order>(module, "ShmOrder")
      .value("GLOO", shm::Order::kGloo)
      .value("FIXED", shm::Order::kFixed);

  // torch has bound the base class; importing it makes a ShmBackend pass for one.
  py::module_::import("torch._C._distributed_c10d");
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<ShmBackend, NoGilOnRelease<ShmBackend>, c10d::Backend>(module, "ShmBackend")
      .def(
          py::init([](c10::intrusive_ptr<c10d::Store> store,
                      int rank,
                      int size,
                      std::chrono::milliseconds timeout,
                      c10::intrusive_ptr<c10d::Backend> inner,
                      shm::Order order,
                      std::string host_identity) {
            return c10::make_intrusive<ShmBackend>(
                std::move(store),
                rank,
                size,
                ShmOptions{order, timeout, std::move(host_identity)},
                std::move(inner));
          }),
          py::arg("store"),
          py::arg("rank"),
          py::arg("size"),
          py::arg("timeout"),
          py::arg("inner"),
          py::arg("order"),
          py::arg("host_identity"),
          NoGil())
      .def("set_leaders", &ShmBackend::set_leaders, py::arg("leaders"), NoGil())
      .def_property_readonly(
          "hosts", [](const ShmBackend& backend) { return backend.topology().hosts; })
      .def_property_readonly("resident_bytes", &ShmBackend::resident_bytes);
}

}  // namespace ddpx::bindings
