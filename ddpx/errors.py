"""Every text of an error raised in Python; those of the C++ core are in ``csrc/errors.cpp``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def _count(number: int, noun: str) -> str:
    """ "1 parameter", "2 parameters"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _count_names(names: Iterable[str], noun: str) -> str:
    """ "1 parameter: weight", "2 parameters: weight, bias"."""
    listed = list(names)
    return f"{_count(len(listed), noun)}: {', '.join(listed)}"


def not_a_module(value: object) -> TypeError:
    return TypeError(
        f"ReducerDDP wraps a torch.nn.Module, but got {type(value).__name__}. "
        "Pass the model itself: ReducerDDP(model)."
    )


def no_process_group() -> ValueError:
    return ValueError(
        "ReducerDDP needs a process group, but no process group has been initialised. "
        "Call torch.distributed.init_process_group(...) first, or pass process_group=."
    )


def not_a_process_group(value: object) -> TypeError:
    return TypeError(
        f"process_group must be a torch.distributed.ProcessGroup or None, "
        f"but got {type(value).__name__}. Make a group with torch.distributed.new_group(...)."
    )


def group_destroyed() -> ValueError:
    return ValueError(
        "process_group was destroyed by torch.distributed.destroy_process_group(). "
        "Make a new group with torch.distributed.new_group(...), or leave process_group out."
    )


def rank_not_in_group() -> ValueError:
    return ValueError(
        "this rank is not a member of the process group that was passed to ReducerDDP. "
        "Construct ReducerDDP only on the members of that group."
    )


def nothing_to_train() -> RuntimeError:
    return RuntimeError(
        "ReducerDDP is not needed: the module has no parameter that requires a gradient. "
        "Use the module itself, or unfreeze parameters before wrapping."
    )


def uninitialized_params(names: Iterable[str]) -> RuntimeError:
    return RuntimeError(
        f"the module has {_count_names(names, 'uninitialized (lazy) parameter')}. Run one forward "
        "on a sample input before wrapping. The forward gives lazy parameters their shapes."
    )


def bad_dtype(name: str, value: object) -> TypeError:
    return TypeError(
        f"{name} must be a floating-point torch.dtype or None, but got {value!r}. "
        f"Pass e.g. {name}=torch.float32."
    )


def dtype_without_sums(name: str, dtype: object) -> ValueError:
    return ValueError(
        f"{name}={dtype} cannot be used: torch does not add floating-point numbers of 8 bits or "
        f"less. Pass a dtype of 16 bits or more, such as {name}=torch.float32."
    )


def dtypes_and_mixed_precision() -> ValueError:
    return ValueError(
        "mixed_precision has a reduce_dtype of its own. reduce_dtype= and grad_dtype= cannot be "
        "combined with mixed_precision=. Set mixed_precision.reduce_dtype, or leave "
        "mixed_precision out."
    )


def grad_dtype_too_narrow(dtype: object, names: Sequence[str]) -> ValueError:
    return ValueError(
        f"grad_dtype={dtype} cannot hold gradients in the dtype of "
        f"{_count_names(names, 'parameter')}. "
        "Pass a wider dtype, such as torch.float32 for a 16-bit model."
    )


def optimizer_in_backward_of_dtensors(name: str, dtensors: Sequence[str]) -> ValueError:
    return ValueError(
        f"{name} cannot step DTensor parameters, but the module has "
        f"{_count_names(dtensors, 'DTensor parameter')}. Run the optimizer after backward."
    )


def optimizer_in_backward_with_dtypes(name: str) -> ValueError:
    return ValueError(
        f"{name} does not work with reduce_dtype= or grad_dtype=. The optimizer would get "
        "gradients in a dtype that it does not expect. Run the optimizer after backward."
    )


def params_under_fsdp(names: Sequence[str]) -> ValueError:
    return ValueError(
        f"fully_shard() already shards and reduces {_count_names(names, 'parameter')}. "
        "ReducerDDP cannot wrap a module with such parameters. To replicate over one mesh "
        "dimension and shard over another, pass a mesh with both dimensions to "
        "fully_shard(module, mesh=...) and do not use ReducerDDP. If the mesh of fully_shard() "
        "has the data-parallel dimension already, wrap only the other parts of the model."
    )


def params_split_over_group(names: Sequence[str]) -> ValueError:
    return ValueError(
        "the ranks of the process group hold different shards of "
        f"{_count_names(names, 'DTensor')}. Different shards must not be averaged. Pass the "
        "data-parallel dimension of the mesh: ReducerDDP(model, device_mesh=mesh['dp'])."
    )


def mixed_device_types(device_types: Iterable[str]) -> ValueError:
    return ValueError(
        f"the parameters of the module are on devices of different types: "
        f"{', '.join(sorted(device_types))}. Move all parameters to devices of one type, e.g. "
        "with module.to('cuda')."
    )


def device_ids_without_single_device(
    device_ids: object, output_device: object, devices: Iterable[str]
) -> ValueError:
    return ValueError(
        f"device_ids and output_device are for modules on one accelerator, but got "
        f"device_ids={device_ids}, output_device={output_device} with parameters on "
        f"{', '.join(sorted(devices))}. For a module on CPU or on several devices, leave both out. "
        "To use several accelerators, start one process per accelerator "
        "(torchrun --nproc-per-node=N) and pass device_ids=[local_rank]."
    )


def bad_device_ids(device_ids: object) -> TypeError:
    return TypeError(
        f"device_ids must be a list with one device, or None, but got "
        f"{type(device_ids).__name__}. Pass e.g. device_ids=[local_rank]."
    )


def bad_dim(dim: object) -> TypeError:
    return TypeError(f"dim must be a whole number, but got {type(dim).__name__}. Leave dim out.")


def not_a_mesh(mesh: object) -> TypeError:
    return TypeError(
        f"device_mesh must be a torch.distributed.device_mesh.DeviceMesh or None, but got "
        f"{type(mesh).__name__}. Make a mesh with init_device_mesh(...)."
    )


def several_device_ids(device_ids: object) -> ValueError:
    return ValueError(
        f"device_ids={device_ids} names several devices, but a process uses one device. Start one "
        "process per device (torchrun --nproc-per-node=N) and pass device_ids=[local_rank]."
    )


def sync_batch_norm_on_cpu(names: Iterable[str]) -> ValueError:
    return ValueError(
        "SyncBatchNorm works on accelerators only, but this module is on CPU and has "
        f"{_count_names(names, 'SyncBatchNorm layer')}. Move the module to an accelerator before "
        "wrapping, or do not call convert_sync_batchnorm() on CPU."
    )


def bad_cap(name: str, value: object) -> ValueError:
    return ValueError(
        f"{name}={value!r} is not a bucket size. "
        f"Pass a finite number of MiB, 0 or more, e.g. {name}=25."
    )


def bad_cap_list(value: object) -> TypeError:
    return TypeError(
        f"bucket_cap_mb_list must be a list of numbers of MiB, but got {value!r}. "
        "Pass e.g. [1, 25, 25]."
    )


def not_a_flag(name: str, value: object) -> TypeError:
    return TypeError(f"{name} must be True or False, but got {value!r}.")


def ranks_disagree(differences: Sequence[str], most: int = 10) -> RuntimeError:
    """``differences``: sentences, each with the values on every rank."""
    lines = [f"  {difference}" for difference in differences[:most]]
    if len(differences) > most:
        lines.append(f"  and {_count(len(differences) - most, 'more difference')}")
    return RuntimeError(
        "ReducerDDP needs the same module, options and versions on every rank, but ranks differ:\n"
        + "\n".join(lines)
        + "\nBuild the model in the same way on every rank. Freeze the same parameters before "
        "wrapping."
    )


def list_ranks(ranks: Sequence[int]) -> str:
    """ "rank 1, rank 2"; of many, the first ones and how many there are."""
    shown = ", ".join(f"rank {rank}" for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown}, … ({len(ranks)} ranks)"


def no_number_of_seconds(name: str, value: object) -> TypeError:
    return TypeError(f"{name} must be a number of seconds, but got {value!r}.")


def bad_seconds(name: str, value: object) -> ValueError:
    return ValueError(
        f"{name}={value!r} is not a valid time limit. Pass a number of seconds from 0.001 to 1e9, "
        "e.g. 10, or inf for no limit."
    )


def bad_switch(variable: str, text: str) -> ValueError:
    return ValueError(
        f"{variable}={text} is neither on nor off. Set {variable} to 1 (on) or to 0 (off)."
    )


def no_other_rank(rank: object, size: int) -> ValueError:
    return ValueError(
        f"rank {rank!r} is not another rank of the process group of this wrapper, which has "
        f"{_count(size, 'rank')}. Pass the number of another rank, counted from 0."
    )


def no_wrapper(value: object) -> TypeError:
    return TypeError(
        f"expected a ReducerDDP, but got {type(value).__name__}. "
        "Pass the ReducerDDP that wraps the model."
    )


def nobody_watches() -> RuntimeError:
    return RuntimeError(
        "health monitoring is off for this wrapper: the world size is 1, the process group has no "
        "store, or DDPX_HEALTH=0 is set. Start at least 2 ranks, and do not set DDPX_HEALTH=0."
    )


def not_default_group() -> RuntimeError:
    return RuntimeError(
        "this ReducerDDP cannot be pickled or copied, because a process group other than the "
        "default group cannot be pickled. Save wrapper.module.state_dict() instead."
    )


def params_wrapped_elsewhere(names: Iterable[str]) -> ValueError:
    return ValueError(
        f"another ReducerDDP already averages {_count_names(names, 'parameter')}. The other "
        "wrapper averages a different set of parameters, or uses another process group. Wrap one "
        "module that holds all parameters, or delete the other wrapper first."
    )


def params_replaced(names: Iterable[str]) -> RuntimeError:
    listed = list(names)
    gradients = "Its gradient" if len(listed) == 1 else "Their gradients"
    return RuntimeError(
        f"the wrapped module now has {_count_names(listed, 'new parameter')}. {gradients} would "
        "not be averaged. Replace layers before wrapping, or wrap the module again: "
        "model = ReducerDDP(model.module, ...)."
    )


def not_averaged_here() -> ValueError:
    return ValueError(
        "register_post_sync_hook() got a parameter that this wrapper does not average, or a module "
        "without such parameters. Pass a parameter of the wrapped module that requires a gradient, "
        "or a submodule with such a parameter."
    )


def hook_not_callable(hook: object) -> TypeError:
    return TypeError(
        f"Communication hook must be callable, but got {type(hook).__name__}. "
        "Pass a function hook(state, bucket) that returns a torch.futures.Future."
    )


def buffer_hook_not_callable(hook: object) -> TypeError:
    return TypeError(
        f"a buffer hook must be callable, but got {type(hook).__name__}. "
        "Pass a function hook(state, named_buffers)."
    )


def hook_bucket_annotation(annotation: object) -> ValueError:
    return ValueError(
        f"Communication hook: bucket annotation should be dist.GradBucket. The annotation is "
        f"{annotation!r}."
    )


def hook_return_annotation(annotation: object) -> ValueError:
    return ValueError(
        "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. "
        f"The annotation is {annotation!r}."
    )


def hook_without_future(returned: object) -> TypeError:
    return TypeError(
        f"Communication hook: expected a torch.futures.Future to be returned, but got "
        f"{type(returned).__name__}. Return the future of a collective call, with .then() to "
        "select the tensor, or return a torch.futures.Future whose result is set."
    )


def optimizer_does_not_overlap(optim: object) -> RuntimeError:
    return RuntimeError(
        f"{optim} does not support overlapped DDP, because torch has no functional form of this "
        "optimizer. Run the optimizer after backward."
    )


def group_and_mesh() -> RuntimeError:
    return RuntimeError(
        "Cannot specify both process_group and device_mesh arguments. Pass only one of the two."
    )


def param_not_given(name: str) -> ValueError:
    return ValueError(
        f"Param with name {name} is averaged, but was not passed. "
        "Pass the result of _build_params_for_reducer()."
    )


def params_not_managed(num_given: int, num_managed: int) -> ValueError:
    return ValueError(
        f"Expected param to name mapping for {_count(num_managed, 'averaged parameter')}, but got "
        f"{_count(num_given, 'parameter')}. Pass the result of _build_params_for_reducer()."
    )


def not_a_1d_mesh(mesh: object) -> RuntimeError:
    return RuntimeError(
        f"Only 1D device mesh is supported, but got {mesh}. Pass the mesh dimension to average "
        "over, e.g. mesh['dp']."
    )


def bad_sample_rate(rate: object) -> ValueError:
    return ValueError(
        f"DDP runtime logging sample rate should be equal or greater than 1, but got {rate!r}."
    )


def bad_mixed_precision(config: object, field: str) -> TypeError:
    return TypeError(
        f"mixed_precision={config!r} has no valid {field}. Pass an object with param_dtype, "
        "reduce_dtype and buffer_dtype. Each must be a floating-point torch.dtype or None. "
        "Example: torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16)."
    )


def group_held_by_hook() -> RuntimeError:
    return RuntimeError(
        "_update_process_group() cannot be used with mixed_precision or a built-in communication "
        "hook. Both keep the process group that existed when they were set. Wrap the module again."
    )


def delayed_without_hook_param() -> ValueError:
    return ValueError(
        "delay_all_reduce_named_params and param_to_hook_all_reduce "
        "need to be set at the same time. Pass both, or leave both out."
    )


def cannot_delay(name: str) -> ValueError:
    return ValueError(
        f"delay_all_reduce_named_params names {name!r}, but the module has no parameter of this "
        "name that requires a gradient. Pass (name, param) pairs of module.named_parameters()."
    )


def cannot_hook_all_reduce() -> ValueError:
    return ValueError(
        "param_to_hook_all_reduce is not a parameter of the module that requires a gradient. "
        "The gradient of this parameter must start the delayed all-reduce. "
        "Pass one of module.parameters() that requires a gradient."
    )


def unknown_sparse_param(name: str) -> ValueError:
    return ValueError(
        f"_set_sparse_metadata() got row indices for {name!r}, but the module has no parameter of "
        "this name with sparse gradients. Pass names of weights of nn.Embedding(..., sparse=True)."
    )


def bad_shm_order(order: object) -> ValueError:
    return ValueError(
        f"the shm backend has no order {order!r}. Pass 'gloo' (the same bits as gloo) or 'fixed' "
        "(sums in rank order, for any bucket size). "
        "Set the order by ddpx.ShmOptions(order=...) or by DDPX_SHM_ORDER."
    )


def bad_shm_options(options: object) -> TypeError:
    return TypeError(
        f"the shm backend takes a ddpx.ShmOptions as pg_options, but got {type(options).__name__}. "
        "Pass e.g. ddpx.ShmOptions(order='fixed'), or leave pg_options out."
    )


def derived_too_early(cls: type) -> RuntimeError:
    return RuntimeError(
        f"{cls.__module__}.{cls.__qualname__} was derived from torch's DistributedDataParallel "
        f"before ddpx.patch_ddp() was called. {cls.__qualname__} would train with DDP. Call "
        f"ddpx.patch_ddp() before {cls.__module__} defines this class."
    )


def patched_with_another(present: type, wrapper: type) -> RuntimeError:
    return RuntimeError(
        f"patch_ddp({wrapper.__name__}) failed, because {present.__name__} already replaces "
        f"DistributedDataParallel. Undo the replacement by {present.__name__} first."
    )


def not_linux(platform: str) -> ImportError:
    return ImportError(f"ddpx runs on Linux only, but this system is {platform}.")


def not_built() -> ImportError:
    return ImportError(
        "the C++ extension of ddpx has not been built for this Python. In a checkout, run: "
        "make build. Elsewhere, install ddpx again: pip install --no-build-isolation PATH"
    )


def built_for_another_torch(built_for: str, installed: str) -> ImportError:
    return ImportError(
        f"ddpx was built for torch {built_for}, but torch {installed} is installed. Install torch "
        f"{built_for.split('+')[0]}, or build ddpx again. In a checkout, run: make clean build. "
        "Elsewhere, run: pip install --no-build-isolation --force-reinstall --no-deps PATH"
    )
