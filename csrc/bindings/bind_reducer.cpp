#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "../buckets/grad_values.h"
#include "../buckets/param_grad.h"
#include "../comm/builtin_hooks.h"
#include "../health_c10d/group_monitor.h"
#include "../reducer/all_reduce_times.h"
#include "../reducer/capture_checks.h"
#include "../reducer/configure.h"
#include "../reducer/reducer.h"
#include "bindings.h"
#include "no_gil_on_release.h"
#include "python_calls.h"
#include "users_hook.h"

namespace py = pybind11;

namespace ddpx::bindings {
namespace {

// Operators treat tensors as outside of the transforms of torch.func that run in the caller. A
// forward may run in vmap() or grad(), and new memory of the reducer must not belong to them.
struct OutsideTransforms {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::DispatchKeySet(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
       c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

void bind_report(py::module_& module) {
  py::class_<StepTimes>(module, "StepTimes")
      .def_readonly("forward", &StepTimes::forward)
      .def_readonly("backward", &StepTimes::backward)
      .def_readonly("comm", &StepTimes::comm)
      .def_readonly("overlap", &StepTimes::overlap);
  py::class_<StepReport>(module, "StepReport")
      .def_readonly("step", &StepReport::step)
      .def_readonly("num_launches", &StepReport::num_launches)
      .def_readonly("times", &StepReport::times)
      .def_readonly("mean", &StepReport::mean)
      .def_readonly("moments", &StepReport::moments);
}

template <auto Method>
auto read(const Reducer& reducer) {
  return (reducer.state().*Method)();
}

}  // namespace

void bind_reducer(py::module_& module) {
  set_attempt(attempt);

  bind_report(module);
  py::class_<ReducerParam>(module, "ReducerParam")
      .def(
          py::init<at::Tensor, std::string, bool, bool>(),
          py::arg("tensor"),
          py::arg("name"),
          py::arg("expect_sparse") = false,
          py::arg("delayed") = false)
      .def_static(
          "of_dtensor",
          [](at::Tensor leaf,
             at::Tensor shard,
             std::string name,
             bool delayed,
             py::function pull,
             py::function push) {
            return ReducerParam{
                std::move(shard),
                std::move(name),
                false,
                delayed,
                std::move(leaf),
                GradLink{with_gil(std::move(pull)), with_gil(std::move(push))}};
          },
          py::arg("leaf"),
          py::arg("shard"),
          py::arg("name"),
          py::arg("delayed"),
          py::arg("pull"),
          py::arg("push"));

  py::class_<Precision>(module, "Precision")
      .def(
          py::init<
              std::optional<at::ScalarType>,
              std::optional<at::ScalarType>,
              std::optional<at::ScalarType>,
              std::optional<at::ScalarType>>(),
          py::kw_only(),
          py::arg("compute") = py::none(),
          py::arg("reduce") = py::none(),
          py::arg("local") = py::none(),
          py::arg("averaged") = py::none());

  py::enum_<Average>(module, "Average")
      .value("MEAN", Average::kMean)
      .value("SUM", Average::kSum)
      .value("WEIGHTS", Average::kWeights);

  py::class_<ReducerOptions>(module, "ReducerOptions")
      .def(
          py::init<
              BucketCaps,
              GraphMode,
              bool,
              bool,
              bool,
              std::optional<std::size_t>,
              Precision,
              bool,
              std::vector<std::vector<std::size_t>>,
              Average,
              std::string,
              int64_t>(),
          py::arg("caps"),
          py::arg("mode"),
          py::arg("gradient_as_bucket_view") = false,
          py::arg("batched_copy") = false,
          py::arg("skip_unused_buckets") = false,
          py::arg("delay_trigger") = py::none(),
          py::arg("precision") = Precision(),
          py::arg("lazy_buckets") = false,
          py::arg("listed_buckets") = std::vector<std::vector<std::size_t>>(),
          py::arg("average") = Average::kMean,
          py::arg("module_name") = "a module",
          py::arg("small_grad_bytes") = 0);

  module.def("lowered", &lowered, py::arg("param"), py::arg("dtype"));
  module.def("forget_grad_dtype", &forget_grad_dtype, py::arg("param"));

  // Calls release the GIL before they wait for the mutex of the reducer: the thread that holds the
  // mutex may need the GIL to call a backend in Python.
  using NoGil = py::call_guard<py::gil_scoped_release, OutsideTransforms>;
  py::class_<Reducer, NoGilShared<Reducer>>(module, "Reducer")
      .def(
          py::init([](const std::vector<ReducerParam>& params,
                      const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
                      c10::intrusive_ptr<c10d::Backend> transport,
                      ReducerOptions options,
                      std::vector<ReducerParam> frozen_params) {
            const py::gil_scoped_release no_gil;
            const OutsideTransforms outside;
            return NoGilShared<Reducer>(Reducer::create(
                params,
                std::move(options),
                make_collective(process_group, language_of(process_group), std::move(transport)),
                std::move(frozen_params),
                monitor_of(process_group)));
          }),
          py::arg("params"),
          py::arg("process_group").none(false),
          py::arg("transport").none(true),
          py::arg("options"),
          py::arg("frozen_params") = std::vector<ReducerParam>())
      .def("prepare_forward", &Reducer::prepare_forward, py::arg("captured") = false, NoGil())
      .def(
          "check_join_capture",
          [](Reducer& reducer, bool captured) {
            reducer.change([&](const auto& context) { refuse_join_capture(context, captured); });
          },
          py::arg("captured"),
          NoGil())
      .def("begin_forward", &Reducer::begin_forward, NoGil())
      .def("use_buckets", &Reducer::use_buckets, py::arg("buckets"), NoGil())
      .def("time_all_reduces", &time_all_reduces, py::arg("num_bytes"), py::arg("repeats"), NoGil())
      .def(
          "watch_outputs",
          &Reducer::watch_outputs,
          py::arg("outputs"),
          py::arg("params_replaced") = false,
          NoGil())
      .def(
          "set_weight", py::overload_cast<double>(&Reducer::set_weight), py::arg("weight"), NoGil())
      .def(
          "set_weight",
          py::overload_cast<const at::Tensor&>(&Reducer::set_weight),
          py::arg("weight"),
          NoGil())
      .def("prepare_for_backward", &Reducer::prepare_for_backward, NoGil())
      .def("rebuild_buckets", &Reducer::rebuild_buckets, NoGil())
      .def("shadow_step", &Reducer::shadow_step, NoGil())
      .def("remove_hooks", &Reducer::remove_hooks, NoGil())
      .def("yield_to", &Reducer::yield_to, py::arg("owner").none(false), NoGil())
      .def("check_can_yield", &Reducer::check_can_yield, NoGil())
      .def("take_back", &Reducer::take_back, NoGil())
      .def_property_readonly("yielded", py::cpp_function(&Reducer::yielded, NoGil()))
      .def("reset", &Reducer::reset, NoGil())
      .def("set_static_graph", &Reducer::set_static_graph, NoGil())
      .def("set_divisor", &set_divisor, py::arg("divisor"), NoGil())
      .def(
          "announce_joined_step",
          [](Reducer& reducer, bool averages) { reducer.join_announcement().announce(averages); },
          py::arg("averages"))
      .def("leave_join", [](Reducer& reducer) { reducer.join_announcement().leave(); })
      .def("set_sample_rate", &set_sample_rate, py::arg("sample_rate"), NoGil())
      .def(
          "set_collective",
          [](Reducer& reducer,
             const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
             c10::intrusive_ptr<c10d::Backend> transport,
             std::optional<int64_t> num_steps) {
            reducer.set_collective(
                make_collective(process_group, language_of(process_group), std::move(transport)),
                num_steps,
                monitor_of(process_group));
          },
          py::arg("process_group").none(false),
          py::arg("transport").none(true),
          py::arg("num_steps") = py::none(),
          NoGil())
      .def(
          "set_comm_hook",
          [](Reducer& reducer, py::object state, py::object hook) {
            auto comm_hook = make_users_hook(std::move(state), std::move(hook));
            const py::gil_scoped_release no_gil;
            set_comm_hook(reducer, std::move(comm_hook));
          },
          py::arg("state"),
          py::arg("hook"))
      .def(
          "set_builtin_comm_hook",
          [](Reducer& reducer,
             c10d::BuiltinCommHookType type,
             c10::intrusive_ptr<c10d::ProcessGroup> process_group) {
            set_comm_hook(reducer, make_builtin_hook(type, std::move(process_group)));
          },
          py::arg("type"),
          py::arg("process_group").none(false),
          NoGil())
      .def(
          "set_mixed_precision",
          [](Reducer& reducer,
             std::optional<at::ScalarType> compute_dtype,
             at::ScalarType reduce_dtype,
             c10::intrusive_ptr<c10d::ProcessGroup> process_group) {
            set_mixed_precision(
                reducer,
                Precision{compute_dtype, reduce_dtype},
                make_reduced_precision_hook(reduce_dtype, std::move(process_group)));
          },
          py::arg("compute_dtype").none(true),
          py::arg("reduce_dtype"),
          py::arg("process_group").none(false),
          NoGil())
      .def("set_sparse_rows", &set_sparse_rows, py::arg("rows"), NoGil())
      .def(
          "set_manual_finalization",
          &Reducer::set_manual_finalization,
          py::arg("required"),
          NoGil())
      .def("finalize_backward", &Reducer::finalize_backward, NoGil())
      .def_property_readonly(
          "should_finalize_after_backward",
          py::cpp_function(read<&ReducerState::should_finalize_after_backward>, NoGil()))
      .def("set_check_finite", &set_check_finite, py::arg("enabled"), NoGil())
      .def("add_recording", &add_recording, py::arg("recording").none(false), NoGil())
      .def("remove_recording", &remove_recording, py::arg("recording").none(false), NoGil())
      .def("number_as_constructed", &number_as_constructed, NoGil())
      .def(
          "set_after_sync",
          [](Reducer& reducer, std::optional<py::function> callback) {
            auto after_sync = callback ? with_gil(std::move(*callback)) : std::function<void()>();
            callback.reset();
            const py::gil_scoped_release no_gil;
            set_after_sync(reducer, std::move(after_sync));
          },
          py::arg("callback"))
      .def_property_readonly(
          "arrival_order", py::cpp_function(read<&ReducerState::arrival_order>, NoGil()))
      .def_property_readonly("used_by_ranks", py::cpp_function(&Reducer::used_by_ranks, NoGil()))
      .def_property_readonly(
          "last_error", py::cpp_function(read<&ReducerState::last_error>, NoGil()))
      .def_property_readonly("report", py::cpp_function(read<&ReducerState::report>, NoGil()))
      .def_property_readonly("num_steps", py::cpp_function(read<&ReducerState::num_steps>, NoGil()))
      .def("mark_waited", &mark_waited, NoGil())
      .def_property_readonly(
          "num_steps_waited", py::cpp_function(read<&ReducerState::num_steps_waited>, NoGil()))
      .def_property_readonly(
          "num_steps_averaged", py::cpp_function(read<&ReducerState::num_steps_averaged>, NoGil()))
      .def_property_readonly("recorded", py::cpp_function(read<&ReducerState::recorded>, NoGil()))
      .def_property("sync_enabled", &Reducer::sync_enabled, &Reducer::set_sync_enabled)
      .def_property_readonly(
          "graph_was_static", py::cpp_function(read<&ReducerState::graph_was_static>, NoGil()))
      .def_property_readonly("phase", py::cpp_function(read<&ReducerState::phase>, NoGil()))
      .def_property_readonly("plan", py::cpp_function(read<&ReducerState::plan>, NoGil()));
}

}  // namespace ddpx::bindings
