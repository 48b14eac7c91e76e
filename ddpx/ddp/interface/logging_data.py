"""The report of ``_get_ddp_logging_data()``, with DDP's names, and DDP's logger."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from types import SimpleNamespace

from torch import nn

from ddpx.comm.process_group import backend_name, world_size
from ddpx.ddp.interface.gradients import GradientInterface
from ddpx.params.dtensors import local_part
from ddpx.reducer.torch_only import refuse

# DDP uses the names of C++, which differ from torch's names for these dtypes.
_DTYPE_NAMES = {
    "float16": "c10::Half",
    "bfloat16": "c10::BFloat16",
    "float32": "float",
    "float64": "double",
}
_MOMENTS = (
    "forward_compute_time_start",
    "backward_compute_time_start",
    "backward_compute_time_end",
    "backward_comm_time_start",
    "backward_comm_time_end",
)
# What to do instead of calls of DDP's logger, by name.
_OF_LOGGER = {
    "_set_comm_hook_name": "Call model.register_comm_hook().",
    "_set_static_graph": "Call model._set_static_graph().",
    "_set_uneven_input_join": "Use model.join().",
    "set_construction_data_and_log": "Call model._get_ddp_logging_data().",
}


def logging_data(wrapper: GradientInterface) -> dict[str, str | int]:
    """Returns arguments, buckets and the times of the last sampled step of a wrapper.

    Sizes are in bytes, and times in nanoseconds. Moments such as ``backward_comm_time_start`` count
    from 1970, and are 0 where nothing was measured. On a device, times are the times of calls on
    the host. DDP reports the times of kernels.
    """
    data = {**_construction(wrapper), **_environment(wrapper), **_buckets(wrapper)}
    if wrapper._ddpx.comm_hook.name is not None:
        data["comm_hook"] = wrapper._ddpx.comm_hook.name
    error = wrapper._ddpx.error or wrapper.reducer.last_error
    if error:
        data |= {"has_error": 1, "error": error}
    return {**data, **_times(wrapper)}


def _construction(wrapper: GradientInterface) -> dict[str, str | int]:
    tensors = [local_part(param.tensor) for param in wrapper._ddpx.managed]
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in tensors})
    return {
        "world_size": world_size(wrapper.process_group),
        "rank": wrapper.process_group.rank(),
        "module_name": type(wrapper.module).__name__,
        "device_ids": _join(wrapper.device_ids or ()),
        "output_device": -1 if wrapper.output_device is None else int(wrapper.output_device),
        "broadcast_buffers": int(wrapper.forward_sync_buffers),
        "bucket_cap_bytes": wrapper.bucket_bytes_cap,
        "find_unused_parameters": int(wrapper.find_unused_parameters),
        "gradient_as_bucket_view": int(wrapper.gradient_as_bucket_view),
        "static_graph": int(wrapper.static_graph),
        "backend_name": backend_name(wrapper.process_group),
        "transport": wrapper.reducer.transport,
        "average": wrapper._ddpx.options.average,
        "dtypes": _join(sorted(_DTYPE_NAMES.get(name, name) for name in dtypes)),
        "total_parameter_size_bytes": sum(t.numel() * t.element_size() for t in tensors),
        "num_parameter_tensors": len(tensors),
        "is_multi_device_module": int(wrapper.is_multi_device_module),
        "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in wrapper.module.modules())),
        "join_uneven_inputs": int(wrapper._ddpx.uneven.joined_before),
    }


def _environment(wrapper: GradientInterface) -> dict[str, str | int]:
    names = ["MASTER_PORT", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG"]
    backend = backend_name(wrapper.process_group)
    data: dict[str, str | int] = {}
    if backend == "gloo":
        names += ["GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"]
        data["gloo_num_threads"] = 2  # torch's number, which cannot be changed or read
    if backend.startswith("nccl"):  # torch 2.15 also has nccl2, nccl-legacy and nccl-lazy
        names += ["NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_NTHREADS", "NCCL_IB_TIMEOUT"]
        data["nccl_async_error_handling"] = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "N/A")
        data["nccl_blocking_wait"] = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "N/A")
    return data | {name.lower(): os.environ.get(name, "N/A") for name in names}


def _buckets(wrapper: GradientInterface) -> dict[str, str | int]:
    reducer = wrapper.reducer
    order = reducer.arrival_order
    sizes = _join(_bucket_bytes(wrapper, reducer.first_buckets))
    if not order:
        return {"bucket_sizes": sizes, "has_rebuilt_buckets": 0}
    buckets = reducer.plan.buckets
    return {
        "bucket_sizes": sizes,
        "has_rebuilt_buckets": 1,
        "rebuilt_bucket_sizes": _join(_bucket_bytes(wrapper, buckets)),
        "rebuilt_per_bucket_param_indices": _join(" ".join(map(str, b)) for b in buckets),
        "prev_iteration_grad_ready_order_indices": _join(order),
    }


def _bucket_bytes(wrapper: GradientInterface, buckets: Sequence[Sequence[int]]) -> list[int]:
    tensors = [local_part(param.tensor) for param in wrapper._ddpx.managed]
    return [sum(tensors[i].numel() * tensors[i].element_size() for i in b) for b in buckets]


def _times(wrapper: GradientInterface) -> dict[str, str | int]:
    report = wrapper.reducer.report
    if report.step < 0:
        return {"iteration": 0}
    data: dict[str, str | int] = {
        "iteration": report.step,
        "num_buckets_reduced": report.num_launches,
        "can_set_static_graph": int(wrapper.reducer.graph_was_static),
    }
    for prefix, times in (("", report.times), ("avg_", report.mean)):
        data[f"{prefix}forward_compute_time"] = times.forward
        data[f"{prefix}backward_compute_time"] = times.backward
        data[f"{prefix}backward_comm_time"] = times.comm
        data[f"{prefix}backward_compute_comm_overlap_time"] = times.overlap
    since_1970 = time.time_ns() - time.monotonic_ns()
    moments = [moment + since_1970 if moment else 0 for moment in report.moments]
    return data | dict(zip(_MOMENTS, moments, strict=True))


def _join(values: object) -> str:
    return ", ".join(str(value) for value in values)  # type: ignore[attr-defined]


@refuse("model.logger", _OF_LOGGER)
class Logger:
    """Takes the place of the object of torch's C++ core that DDP has as ``logger``."""

    def __init__(self, wrapper: GradientInterface) -> None:
        self._wrapper = weakref.proxy(wrapper)

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        data = self._wrapper._get_ddp_logging_data()
        return SimpleNamespace(
            strs_map={key: value for key, value in data.items() if isinstance(value, str)},
            ints_map={key: value for key, value in data.items() if isinstance(value, int)},
        )

    def set_error_and_log(self, error: str) -> None:
        """Makes ``error`` the last error in the logging data."""
        self._wrapper._ddpx.error = error

    def set_runtime_stats_and_log(self) -> None:
        """Has no effect: the reducer measures steps by itself."""
