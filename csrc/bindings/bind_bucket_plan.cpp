#include "../buckets/bucket_plan.h"
#include "../reducer/phase.h"
#include "bindings.h"

namespace py = pybind11;

namespace ddpx::bindings {

void bind_phase(py::module_& module) {
  py::enum_<Phase>(module, "Phase")
      .value("IDLE", Phase::kIdle)
      .value("REBUILDING", Phase::kRebuilding)
      .value("COLLECTING", Phase::kCollecting)
      .value("FINALIZING", Phase::kFinalizing)
      .value("FAILED", Phase::kFailed)
      .value("READY", Phase::kReady)
      .value("FINALIZED", Phase::kFinalized)
      .def_property_readonly("words", &to_string);
  module.def("transition", &transition, py::arg("from_"), py::arg("to"));
}

void bind_bucket_plan(py::module_& module) {
  py::enum_<GraphMode>(module, "GraphMode")
      .value("DEFAULT", GraphMode::kDefault)
      .value("FIND_UNUSED", GraphMode::kFindUnused)
      .value("STATIC", GraphMode::kStatic);

  py::class_<ParamMeta>(module, "ParamMeta")
      .def(py::init(&ParamMeta::of), py::arg("param"), py::arg("expect_sparse") = false)
      .def_readonly("numel", &ParamMeta::numel)
      .def_readonly("element_bytes", &ParamMeta::element_bytes)
      .def_readonly("expect_sparse", &ParamMeta::expect_sparse);

  py::class_<BucketCaps>(module, "BucketCaps")
      .def(
          py::init<int64_t, int64_t, std::vector<int64_t>>(),
          py::arg("first_bytes"),
          py::arg("cap_bytes"),
          py::arg("listed_bytes") = std::vector<int64_t>())
      .def_readonly("first_bytes", &BucketCaps::first_bytes)
      .def_readonly("cap_bytes", &BucketCaps::cap_bytes)
      .def_readonly("listed_bytes", &BucketCaps::listed_bytes);

  py::class_<BucketPlan>(module, "BucketPlan")
      .def_static(
          "initial", &BucketPlan::initial, py::arg("params"), py::arg("caps"), py::arg("mode"))
      .def_static(
          "by_arrival",
          &BucketPlan::by_arrival,
          py::arg("params"),
          py::arg("caps"),
          py::arg("arrival_order"))
      .def_property_readonly("buckets", [](const BucketPlan& plan) {
        std::vector<std::vector<std::size_t>> buckets;
        for (const auto& bucket : plan.buckets()) {
          buckets.push_back(bucket.param_indices);
        }
        return buckets;
      });
}

}  // namespace ddpx::bindings
