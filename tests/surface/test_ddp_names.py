"""Every name of the installed torch's DDP: a derived class may override it, a script may use it, or
ReducerDDP refuses it by name. Signatures are those of DDP, too. The lists fail when torch adds a
name or an argument. ``NEWER`` has what older releases of torch lack."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from both_wrappers import WRAPPERS, Mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP
from ddpx.reducer import Reducer
from ddpx.version import release_of

# Methods and properties that forward, construction, join() or a copy call: an override runs.
CALLED = {
    "__getstate__",
    "__init__",
    "__setstate__",
    "_assign_modules_buffers",
    "_build_debug_param_to_name_mapping",
    "_build_params_for_reducer",
    "_check_and_sync_module_buffers",
    "_check_comm_hook",
    "_check_default_group",
    "_check_global_requires_backward_grad_sync",
    "_check_sync_bufs_post_fwd",
    "_check_sync_bufs_pre_fwd",
    "_default_broadcast_coalesced",
    "_distributed_broadcast_coalesced",
    "_distributed_rank",
    "_find_common_rank",
    "_inside_ddp_forward",
    "_lazy_init",
    "_passing_sync_batchnorm_handle",
    "_post_forward",
    "_pre_forward",
    "_run_ddp_forward",
    "_set_static_graph",
    "_setup_in_backward_optimizers",
    "_sync_buffers",
    "_sync_final_model",
    "_sync_module_buffers",
    "forward",
    "join_device",
    "join_hook",
    "join_process_group",
    "register_comm_hook",
    "will_sync_module_buffers",
}
# Names that only scripts, trainers and torch's other code use.
FOR_CALLERS = {
    "_active_ddp_module",
    "_check_manual_backward_finalization_supported",
    "_check_reducer_finalized",
    "_get_active_ddp_module",
    "_get_data_parallel_params",
    "_get_ddp_logging_data",
    "_get_parameters",
    "_register_buffer_comm_hook",
    "_register_builtin_comm_hook",
    "_register_fused_optim",
    "_remove_autograd_hooks",
    "_set_ddp_runtime_logging_sample_rate",
    "_set_ddp_sink_clone",
    "_set_params_and_buffers_to_ignore_for_model",
    "_set_sparse_metadata",
    "_update_process_group",
    "broadcast_buffers",
    "finalize_backward",
    "gather",
    "join",
    "no_sync",
    "require_manual_backward_finalization",
    "scatter",
    "should_finalize_after_backward",
    "to_kwargs",
    "train",
}
# Names that only drive torch's own reducer or logger: use and override are errors.
REFUSED = {
    "_clear_grad_buffer",
    "_ddp_init_helper",
    "_delayed_all_reduce_hook",
    "_fire_reducer_autograd_hook",
    "_match_all_reduce_for_bwd_pass",
    "_match_unused_params_allreduce",
    "_module_wait_for_copy_hook",
    "_register_accum_grad_hook",
    "_register_delay_all_reduce_hook",
    "_root_copy_hook",
}
# Scripts may use them. ReducerDDP does not call them, and refuses an override.
REFUSED_OVERRIDES = {"_log_and_throw"}
# Of Python's class machinery.
OF_PYTHON = {"__abstractmethods__", "__annotations__", "__doc__", "__module__", "_abc_impl"}
OF_PYTHON |= {"__slots__", "__dict__", "__weakref__", "__static_attributes__", "__firstlineno__"}
OF_PYTHON |= {"__annotate__", "__annotate_func__", "__annotations_cache__", "__parameters__"}

ATTRIBUTES = {
    "_accum_grad_hooks",
    "_comm_hooks",
    "_ddp_sink_clone",
    "_delay_all_reduce_all_params",
    "_delay_all_reduce_params",
    "_has_rebuilt_buckets",
    "_join_config",
    "_lazy_init_ran",
    "_module_parameters",
    "_require_manual_backward_finalization",
    "_use_python_reducer",
    "batched_grad_copy",
    "broadcast_bucket_size",
    "bucket_bytes_cap",
    "bucket_bytes_cap_default",
    "bucket_bytes_cap_list",
    "device",
    "device_ids",
    "device_type",
    "dim",
    "find_unused_parameters",
    "forward_sync_buffers",
    "gradient_as_bucket_view",
    "is_multi_device_module",
    "lazy_bucket_allocation",
    "logger",
    "mixed_precision",
    "modules_buffers",
    "named_module_buffers",
    "output_device",
    "parameters_to_ignore",
    "process_group",
    "reducer",
    "require_backward_grad_sync",
    "require_forward_param_sync",
    "skip_all_reduce_unused_params",
    "static_graph",
    "use_side_stream_for_tensor_copies",
}
REFUSED_ATTRIBUTES = {"_bucket_config", "_delay_grad_buffer", "_delay_grad_views"}

OF_REDUCER = {
    "_check_reducer_finalized",
    "_ddp_graph_static",
    "_finalize_backward_manual",
    "_get_local_used_map",
    "_install_post_backward_futures",
    "_rebuild_buckets",
    "_remove_autograd_hooks",
    "_run_allreduce_hook",
    "_set_ddp_runtime_logging_sample_rate",
    "_set_manual_finalization_required",
    "_set_sparse_metadata",
    "_set_static_graph",
    "_should_finalize_after_backward",
    "_update_process_group",
    "prepare_for_backward",
    "prepare_for_forward",
}
REFUSED_OF_REDUCER = {
    "_autograd_hook",
    "_delay_all_reduce",
    "_get_zeros_like_grad_buckets",
    "_push_all_rebuilt_params",
    "_reset_state",
    "_run_comm_hook",
    "_set_forward_pass_work_handle",
    "_set_mixed_precision_param_dtype",
    "_set_optimizer_in_backward",
    "get_backward_stats",
    "set_logger",
}
OF_LOGGER = {"_get_ddp_logging_data", "set_error_and_log", "set_runtime_stats_and_log"}
REFUSED_OF_LOGGER = {
    "_set_comm_hook_name",
    "_set_static_graph",
    "_set_uneven_input_join",
    "set_construction_data_and_log",
}

# Methods, attributes and arguments of DDP and of its reducer, by the release of torch that brought
# them. ReducerDDP has them with every torch.
_2_15 = {
    "_check_manual_backward_finalization_supported",
    "_finalize_backward_manual",
    "_require_manual_backward_finalization",
    "_set_manual_finalization_required",
    "_should_finalize_after_backward",
    "finalize_backward",
    "lazy_bucket_allocation",
    "require_manual_backward_finalization",
    "should_finalize_after_backward",
}
INSTALLED = release_of(torch.__version__)
NEWER = _2_15 if INSTALLED < (2, 15) else set()

# Arguments of ReducerDDP alone. They are keyword-only, so that DDP may add arguments.
OF_DDPX = ["reduce_dtype", "grad_dtype", "average", "transport", "bucket_plan"]
# Methods that ddpx adds to those of DDP and of nn.Module.
ONLY_HERE = {
    "register_post_sync_hook",
    "reset",
    "set_check_finite",
    "set_requires_gradient_sync",
    "set_weight",
    "synchronized_grads",
    "bucket_plan",
    "plan_report",
    "wait_for_gradients",
}
# Intended differences of signatures of the reducer's methods: the names of arguments, by method.
# DDP's reducer takes the outputs, or one output. Ours ignores them, and may be called without.
OTHER_ARGUMENTS = {
    "prepare_for_backward": ["outputs"],
}


def _names(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith(("__", "_pybind11"))}


def test_every_method_of_ddp_is_listed():
    theirs = set(vars(DistributedDataParallel)) - OF_PYTHON
    listed = (CALLED, FOR_CALLERS, REFUSED, REFUSED_OVERRIDES)
    assert theirs == set().union(*listed) - NEWER
    assert len(set().union(*listed)) == sum(map(len, listed))


def test_every_method_of_the_reducer_and_the_logger_is_listed():
    assert _names(dist.Reducer) == (OF_REDUCER | REFUSED_OF_REDUCER) - NEWER
    assert _names(dist.Logger) == OF_LOGGER | REFUSED_OF_LOGGER


@pytest.mark.wrapper_only
def test_names_beyond_ddps():
    """Public names in ``dir()``: all those of DDP, and the listed ones of ddpx."""
    theirs, ours = ({name for name in dir(cls) if not name.startswith("_")} for cls in WRAPPERS)
    assert theirs <= ours
    # What is an attribute of an instance of DDP may be a property here.
    assert ours - theirs - ATTRIBUTES - NEWER - {"buffer_hook"} == ONLY_HERE


def _parameters(function: Any, default: bool = True) -> list[tuple[Any, ...]]:
    return [
        (p.name, p.kind, p.default if default else p.default is p.empty)
        for p in inspect.signature(function).parameters.values()
    ]


def test_signatures_are_those_of_ddp():
    for name in sorted((CALLED | FOR_CALLERS) - NEWER):
        theirs = inspect.getattr_static(DistributedDataParallel, name)
        ours = inspect.getattr_static(ReducerDDP, name)
        if isinstance(theirs, property) or name == "_active_ddp_module":
            assert isinstance(ours, property), name
            has_setter = getattr(theirs, "fset", None) is not None
            assert not has_setter or ours.fset is not None, name
        elif name != "__init__":
            own = [
                _parameters(getattr(cls, name), default=False)
                for cls in (DistributedDataParallel, ReducerDDP)
            ]
            assert own[0] == own[1], name


def test_arguments_of_the_constructor():
    theirs, ours = (_parameters(cls.__init__) for cls in (DistributedDataParallel, ReducerDDP))
    positional = [p for p in ours if p[1] is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert theirs == [p for p in positional if p[0] not in NEWER]
    assert [p[0] for p in positional][-1] == "lazy_bucket_allocation"
    keyword_only = [(name, inspect.Parameter.KEYWORD_ONLY, None) for name in OF_DDPX]
    assert ours == positional + keyword_only


def _of_docstring(method: Any) -> set[tuple[str, ...]]:
    """The names of arguments in the signatures that pybind11 writes, one for each overload."""
    found = re.findall(rf"^(?:\d+\. )?{method.__name__}\((.*)\) ->", method.__doc__, re.MULTILINE)
    assert found, method.__doc__
    return {tuple(re.findall(r"(?:^|, )(\w+): ", arguments))[1:] for arguments in found}


def test_signatures_of_the_reducer():
    for name in sorted(OF_REDUCER - NEWER):
        theirs = _of_docstring(getattr(dist.Reducer, name))
        ours = [p for p in _parameters(getattr(Reducer, name))[1:]]
        if name in OTHER_ARGUMENTS:
            assert [p[0] for p in ours] == OTHER_ARGUMENTS[name], name
            continue
        (arguments,) = theirs
        assert len(arguments) == len(ours), name
        for their_name, (our_name, *_) in zip(arguments, ours, strict=True):
            assert their_name == our_name or re.fullmatch(r"arg\d+", their_name), name


def _check_attributes() -> None:
    theirs, ours = (cls(Mlp()) for cls in WRAPPERS)
    plain = set(vars(nn.Linear(1, 1)))
    for model in (theirs, ours):
        model(torch.ones(1, 16)).sum().backward()
    assert set(vars(theirs)) - plain == (ATTRIBUTES | REFUSED_ATTRIBUTES) - NEWER
    for name in ATTRIBUTES:
        getattr(ours, name)
    same = ATTRIBUTES - {"_accum_grad_hooks", "_comm_hooks", "_join_config", "_module_parameters"}
    same -= {"logger", "reducer", "parameters_to_ignore", "use_side_stream_for_tensor_copies"}
    for name in same - NEWER:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert [id(p) for p in ours._module_parameters] == [id(p) for p in ours.parameters()]
    for name in REFUSED_ATTRIBUTES:
        with pytest.raises(NotImplementedError, match=rf"model\.{name} "):
            getattr(ours, name)
        with pytest.raises(NotImplementedError, match=rf"model\.{name} "):
            setattr(ours, name, None)


@pytest.mark.wrapper_only
def test_attributes(ranks):
    ranks(1).run(_check_attributes)


def _check_code_that_reads_every_attribute() -> None:
    x = torch.full((2, 16), 1.0 + dist.get_rank())
    model = ReducerDDP(Mlp())
    assert REFUSED_ATTRIBUTES.isdisjoint(dict(inspect.getmembers(model)))
    traced = torch.jit.trace(model, x, check_trace=False)
    averages = []
    for forward in (model, traced, traced):
        model.zero_grad()
        forward(x).sum().backward()
        averages.append([param.grad for param in model.parameters()])
    for grads in averages[1:]:
        torch.testing.assert_close(grads, averages[0])


@pytest.mark.wrapper_only
def test_code_that_reads_every_attribute(ranks):
    ranks(2).run(_check_code_that_reads_every_attribute)


def _check_refused() -> None:
    model = ReducerDDP(Mlp())
    places: list[tuple[Any, str, set[str]]] = [
        (model, "model", REFUSED),
        (model.reducer, "model.reducer", REFUSED_OF_REDUCER),
        (model.logger, "model.logger", REFUSED_OF_LOGGER),
    ]
    for owner, place, names in places:
        for name in names:
            with pytest.raises(NotImplementedError, match=rf"{place}\.{name} .*ReducerDDP"):
                getattr(owner, name)(1, 2)
            with pytest.raises(NotImplementedError, match=rf"{place}\.{name} "):
                setattr(owner, name, lambda: None)
    for name in REFUSED | REFUSED_OVERRIDES | REFUSED_ATTRIBUTES:
        derived = type("Derived", (ReducerDDP,), {name: lambda self, *args: None})
        with pytest.raises(NotImplementedError, match=rf"Derived\.{name} "):
            derived(Mlp())
    model(torch.ones(1, 16)).sum().backward()


def test_refused_names(ranks):
    ranks(1).run(_check_refused)


def _check_futures() -> None:
    """Futures that are handed to the reducer: the end of backward waits for them."""
    model = ReducerDDP(Mlp())
    future: torch.futures.Future[int] = torch.futures.Future()
    seen: list[int] = []
    model.reducer._install_post_backward_futures([future.then(lambda f: seen.append(f.value()))])
    loss = model(torch.ones(1, 16)).sum()
    future.set_result(3)
    loss.backward()
    assert seen == [3]


def test_futures_of_the_reducer(ranks):
    ranks(2).run(_check_futures)


def _check_logger() -> None:
    for cls in WRAPPERS:
        model = cls(Mlp())
        data = model.logger._get_ddp_logging_data()
        assert data.strs_map["module_name"] == "Mlp"
        assert data.ints_map["world_size"] == 1
        with pytest.raises(KeyError, match="unknown"):
            model._log_and_throw(KeyError, "unknown")
        assert "unknown" in model._get_ddp_logging_data()["error"]
        model.logger.set_error_and_log("of the script")
        assert "of the script" in model._get_ddp_logging_data()["error"]


@pytest.mark.wrapper_only
def test_logger(ranks):
    ranks(1).run(_check_logger)
