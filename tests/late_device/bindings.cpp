#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "allocator.h"
#include "capture.h"
#include "counters.h"
#include "ignored.h"
#include "process_group.h"
#include "settings.h"
#include "streams.h"

namespace py = pybind11;

namespace late {
namespace {

py::dict as_dict(const std::map<std::string, Count>& counts) {
  py::dict result;
  for (const auto& [name, count] : counts) {
    result[py::str(name)] = py::make_tuple(count.operations, count.bytes);
  }
  return result;
}

void sleep_on_current_stream(std::chrono::milliseconds time) {
  current_queue(current_device()).push("sleep", [time] { std::this_thread::sleep_for(time); });
}

}  // namespace

PYBIND11_MODULE(late_device_C, m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.attr("NUM_DEVICES") = kNumDevices;
  m.def("set_hold", &set_hold, py::arg("max_hold"), py::arg("seed") = 0);
  m.def("set_failures_hang", &set_failures_hang, py::arg("hang"));
  m.def("set_delay", &set_delay, py::arg("part"), py::arg("delay"));
  m.def("begin_capture", &begin_capture);
  m.def("end_capture", &end_capture, NoGil());
  m.def("sleep", &sleep_on_current_stream, py::arg("time"), NoGil());
  m.def("current_device", [] { return int(current_device().index()); });
  m.def("set_device", [](int index) {
    set_current_device({kType, static_cast<c10::DeviceIndex>(index)});
  });
  m.def(
      "synchronize",
      [](int index) { synchronize_device({kType, static_cast<c10::DeviceIndex>(index)}); },
      NoGil());

  m.def("counts", [](int device) {
    const auto counts = counts_of(device);
    py::dict result;
    result["native"] = as_dict(counts.native);
    result["fallback"] = as_dict(counts.fallback);
    result["collective"] = as_dict(counts.collective);
    return result;
  });
  m.def("num_synchronisations", &num_synchronisations);
  m.def("num_events_made", &num_events_made);
  m.def("reset_counts", &reset_counts);

  m.def("memory_in_use", &num_bytes_in_use);

  m.def("set_tracing", &set_tracing);
  py::class_<Span>(m, "Span")
      .def_readonly("name", &Span::name)
      .def_readonly("device", &Span::device)
      .def_readonly("stream_id", &Span::stream_id)
      .def_readonly("begin_ns", &Span::begin_ns)
      .def_readonly("end_ns", &Span::end_ns);
  m.def("trace", &trace);

  py::enum_<Wait>(m, "Wait")
      .value("STREAM", Wait::kStream)
      .value("HOST", Wait::kHost)
      .value("RECORD", Wait::kRecord);
  m.def("ignore", &ignore, py::arg("kind"), py::arg("callers"));
  m.def("stop_ignoring", &stop_ignoring);
  m.def("num_ignored", &num_ignored);

  py::module_::import("torch._C._distributed_c10d");
  py::class_<LateBackend, c10::intrusive_ptr<LateBackend>, c10d::Backend>(m, "LateBackend")
      .def(
          py::init<int, int, std::vector<c10::intrusive_ptr<c10d::Backend>>, std::string>(),
          py::arg("rank"),
          py::arg("size"),
          py::arg("gloo"),
          py::arg("name") = "late",
          NoGil())
      .def_property_readonly("num_calls", &LateBackend::num_calls)
      .def_property_readonly("num_allocations", &LateBackend::num_allocations)
      .def_property_readonly("num_aborts", &LateBackend::num_aborts);
}

}  // namespace late
