#include <memory>
#include <vector>

#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include "../observe/recording.h"
#include "bindings.h"

namespace py = pybind11;

namespace ddpx::bindings {
namespace {

// One row per event: time in ns, step, kind, index.
at::Tensor as_tensor(const std::vector<Event>& events) {
  auto rows = at::empty({static_cast<int64_t>(events.size()), 4}, at::kLong);
  auto* value = rows.mutable_data_ptr<int64_t>();
  for (const auto& event : events) {
    *value++ = event.time_ns;
    *value++ = event.step;
    *value++ = static_cast<int64_t>(event.kind);
    *value++ = event.index;
  }
  return rows;
}

}  // namespace

void bind_recording(py::module_& module) {
  module.def("steady_now", &steady_now);

  py::enum_<EventKind>(module, "EventKind")
      .value("FORWARD_BEGIN", EventKind::kForwardBegin)
      .value("FORWARD_END", EventKind::kForwardEnd)
      .value("PHASE", EventKind::kPhase)
      .value("BACKWARD_BEGIN", EventKind::kBackwardBegin)
      .value("STEP_BEGIN", EventKind::kStepBegin)
      .value("GRAD_ARRIVED", EventKind::kGradArrived)
      .value("BUCKET_READY", EventKind::kBucketReady)
      .value("LAUNCHED", EventKind::kLaunched)
      .value("COMPLETED", EventKind::kCompleted)
      .value("BACKWARD_END", EventKind::kBackwardEnd)
      .value("WAIT_BEGIN", EventKind::kWaitBegin)
      .value("WAIT_END", EventKind::kWaitEnd)
      .value("AGREE_BEGIN", EventKind::kAgreeBegin)
      .value("AGREE_END", EventKind::kAgreeEnd)
      .value("WRITTEN_BACK", EventKind::kWrittenBack)
      .value("STEP_END", EventKind::kStepEnd)
      .value("LOCAL_BACKWARD_END", EventKind::kLocalBackwardEnd);

  py::class_<PlanInForce>(module, "PlanInForce")
      .def_readonly("first_step", &PlanInForce::first_step)
      .def_readonly("plan", &PlanInForce::plan);

  py::class_<Recording, std::shared_ptr<Recording>>(module, "Recording")
      .def(
          py::init([](std::size_t capacity, const at::Device& device, uint32_t max_steps) {
            const py::gil_scoped_release no_gil;  // it may wait for the device
            return std::make_shared<Recording>(capacity, device, max_steps);
          }),
          py::arg("capacity"),
          py::arg("device"),
          py::arg("max_steps") = 0)
      .def("close", &Recording::close, py::call_guard<py::gil_scoped_release>())
      .def("collect", &Recording::collect, py::call_guard<py::gil_scoped_release>())
      .def("events", [](const Recording& recording) { return as_tensor(recording.log().read()); })
      .def_property_readonly("plans", &Recording::plans)
      .def_property_readonly(
          "capacity", [](const Recording& recording) { return recording.log().capacity(); })
      .def_property_readonly(
          "num_added", [](const Recording& recording) { return recording.log().num_added(); })
      .def_property_readonly("device_error_ns", &Recording::device_error_ns);
}

}  // namespace ddpx::bindings
