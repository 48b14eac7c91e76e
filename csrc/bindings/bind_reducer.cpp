#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../reducer.h"
#include "bindings.h"

namespace py = pybind11;

namespace ddpx::bindings {
namespace {

// Python's handle of a reducer. Dropping the last one can destroy a process group, which joins
// threads that may be waiting for the GIL; so it is let go of meanwhile.
std::shared_ptr<Reducer> without_gil_at_end(std::shared_ptr<Reducer> reducer) {
  auto* raw = reducer.get();
  return {raw, [reducer = std::move(reducer)](Reducer*) mutable {
            const py::gil_scoped_release no_gil;
            reducer.reset();
          }};
}

}  // namespace

void bind_reducer(py::module_& module) {
  py::class_<ReducerParam>(module, "ReducerParam")
      .def(
          py::init([](at::Tensor tensor, std::string name, bool expect_sparse) {
            return ReducerParam{std::move(tensor), std::move(name), expect_sparse};
          }),
          py::arg("tensor"),
          py::arg("name"),
          py::arg("expect_sparse") = false);

  // The lock of the reducer is never waited for with the GIL held: its holder may need the GIL to
  // call a backend that is written in Python.
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<Reducer, std::shared_ptr<Reducer>>(module, "Reducer")
      .def(
          py::init([](const std::vector<ReducerParam>& params,
                      c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                      BucketCaps caps,
                      GraphMode mode,
                      bool gradient_as_bucket_view) {
            const py::gil_scoped_release no_gil;
            return without_gil_at_end(
                Reducer::create(
                    params,
                    ReducerOptions{std::move(caps), mode, gradient_as_bucket_view},
                    make_collective(std::move(process_group))));
          }),
          py::arg("params"),
          py::arg("process_group"),
          py::arg("caps"),
          py::arg("mode"),
          py::arg("gradient_as_bucket_view"))
      .def("prepare_forward", &Reducer::prepare_forward, NoGil())
      .def("watch_outputs", &Reducer::watch_outputs, py::arg("outputs"), NoGil())
      .def("remove_hooks", &Reducer::remove_hooks, NoGil())
      .def_property("sync_enabled", &Reducer::sync_enabled, &Reducer::set_sync_enabled)
      .def_property_readonly("phase", py::cpp_function(&Reducer::phase, NoGil()))
      .def_property_readonly("plan", py::cpp_function(&Reducer::plan, NoGil()));
}

}  // namespace ddpx::bindings
