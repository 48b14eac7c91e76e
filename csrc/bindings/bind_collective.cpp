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

void wait(const Group& group, Collective& collective, c10d::Work& work, c10::Device device) {
  try {
    collective.wait(work, device);
  } catch (const health::GroupFailed&) {
    if (const auto monitor = monitor_of(group)) {
      monitor->raise_if_failed();
    }
    throw;
  }
}

// A collective call of Python to a group that is written in C++. Returns when the current stream
// has the result. The group and Python get different aliases of a tensor. A thread of the group may
// be the last owner of its alias. If Python had an object of that alias, the thread would need the
// GIL and a Python state, which a profiler with stacks does not expect.
class Call {
 public:
  explicit Call(const Group& group) : group_(group) {}

  void all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op) {
    std::vector<at::Tensor> tensors = {alias_of(tensor)};
    const auto result = tensors.front();
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    wait_for(group_->allreduce(tensors, options), tensor.device());
    if (result.is_sparse()) {
      tensor.copy_(result);  // a sparse alias has values of its own
    }
  }

  void broadcast(const at::Tensor& tensor, int64_t source) {
    std::vector<at::Tensor> tensors = {alias_of(tensor)};
    c10d::BroadcastOptions options;
    options.rootRank = source;
    wait_for(group_->broadcast(tensors, options), tensor.device());
  }

  std::vector<at::Tensor> all_gather(const at::Tensor& tensor) {
    std::vector<at::Tensor> own = {alias_of(tensor)};
    std::vector<at::Tensor> gathered;
    std::vector<std::vector<at::Tensor>> outputs(1);
    for (int rank = 0; rank < group_->getSize(); ++rank) {
      gathered.push_back(at::empty_like(tensor));
      outputs.front().push_back(alias_of(gathered.back()));
    }
    wait_for(group_->allgather(outputs, own), tensor.device());
    return gathered;
  }

 private:
  static at::Tensor alias_of(const at::Tensor& tensor) {
    return tensor.is_complex() ? at::view_as_real(tensor) : tensor.detach();
  }

  void wait_for(const Collective::Work& work, c10::Device device) {
    if (work) {
      const auto collective = make_collective(group_, WrittenIn::kCpp);
      wait(group_, *collective, *work, device);
    }
  }

  const at::NoGradGuard no_grad_;
  const Group& group_;
};

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
        wait(process_group, *collective, *work, device);
      },
      py::arg("work").none(false),
      py::arg("process_group").none(false),
      py::arg("device").none(false),
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "all_reduce",
      [](const at::Tensor& tensor, const Group& process_group, const c10d::ReduceOp& op) {
        Call(process_group).all_reduce(tensor, op);
      },
      py::arg("tensor"),
      py::arg("process_group").none(false),
      py::arg("op"),
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "broadcast",
      [](const at::Tensor& tensor, const Group& process_group, int64_t source) {
        Call(process_group).broadcast(tensor, source);
      },
      py::arg("tensor"),
      py::arg("process_group").none(false),
      py::arg("source"),
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "all_gather",
      [](const at::Tensor& tensor, const Group& process_group) {
        return Call(process_group).all_gather(tensor);
      },
      py::arg("tensor"),
      py::arg("process_group").none(false),
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace ddpx::bindings
