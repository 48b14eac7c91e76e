"""Every text of an error raised in Python; those of the C++ core are in ``csrc/errors.cpp``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def not_a_module(value: object) -> TypeError:
    return TypeError(
        f"ReducerDDP wraps a torch.nn.Module, but got {type(value).__name__}. "
        "Pass the model itself: ReducerDDP(model)."
    )


def no_process_group() -> ValueError:
    return ValueError(
        "ReducerDDP needs a process group, and none has been initialised. "
        "Call torch.distributed.init_process_group(...) first, or pass process_group=."
    )


def not_a_process_group(value: object) -> TypeError:
    return TypeError(
        f"process_group must be a torch.distributed.ProcessGroup or None, "
        f"but got {type(value).__name__}. Make one with torch.distributed.new_group(...)."
    )


def group_destroyed() -> ValueError:
    return ValueError(
        "process_group was destroyed by torch.distributed.destroy_process_group(). "
        "Make a new one with torch.distributed.new_group(...), or leave it out."
    )


def rank_not_in_group() -> ValueError:
    return ValueError(
        "this rank is not a member of the process group that ReducerDDP got. "
        "Construct the wrapper on the group's members only."
    )


def nothing_to_train() -> RuntimeError:
    return RuntimeError(
        "ReducerDDP is not needed: the module has no parameter that requires a gradient. "
        "Use the module itself, or unfreeze parameters before wrapping."
    )


def uninitialized_params(names: Iterable[str]) -> RuntimeError:
    return RuntimeError(
        f"the module has uninitialized (lazy) parameters: {', '.join(names)}. "
        "Run one forward on sample input before wrapping, so that they get their shapes."
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
        "mixed_precision has a reduce_dtype of its own, so that reduce_dtype= and grad_dtype= "
        "cannot be given beside it. Set mixed_precision.reduce_dtype, or leave mixed_precision out."
    )


def grad_dtype_too_narrow(dtype: object, names: Sequence[str]) -> ValueError:
    return ValueError(
        f"grad_dtype={dtype} cannot hold gradients in the dtype of these parameters: "
        f"{', '.join(names)}. Pass a wider dtype, such as torch.float32 for a 16-bit model."
    )


def optimizer_in_backward_of_dtensors(name: str, dtensors: Sequence[str]) -> ValueError:
    return ValueError(
        f"{name} would not step DTensor parameters: {', '.join(dtensors)}. Run the optimizer "
        "after backward."
    )


def optimizer_in_backward_with_dtypes(name: str) -> ValueError:
    return ValueError(
        f"{name} does not work with reduce_dtype= or grad_dtype=: it would step on gradients in "
        "another dtype than the optimizer expects. Run the optimizer after backward."
    )


def params_under_fsdp(names: Sequence[str]) -> ValueError:
    return ValueError(
        f"fully_shard() already shards and reduces parameters of this module: "
        f"{', '.join(names)}. ReducerDDP does not wrap such a module. To replicate over one mesh "
        "dimension and shard over another, pass a mesh of both to fully_shard(module, mesh=...) "
        "and wrap nothing. If the mesh of fully_shard() has the data-parallel dimension already, "
        "apply ReducerDDP to the other parts of the model alone."
    )


def params_split_over_group(names: Sequence[str]) -> ValueError:
    return ValueError(
        "ranks of the process group hold different shards of the same DTensor, which must not be "
        f"averaged: {', '.join(names)}. Pass the data-parallel dimension of the mesh: "
        "ReducerDDP(model, device_mesh=mesh['dp'])."
    )


def mixed_device_types(device_types: Iterable[str]) -> ValueError:
    return ValueError(
        f"the module's parameters lie on devices of different types: "
        f"{', '.join(sorted(device_types))}. Move all of them to one type, e.g. module.to('cuda')."
    )


def device_ids_without_single_device(
    device_ids: object, output_device: object, devices: Iterable[str]
) -> ValueError:
    return ValueError(
        f"device_ids and output_device are for modules on one accelerator, but got "
        f"device_ids={device_ids}, output_device={output_device} with parameters on "
        f"{', '.join(sorted(devices))}. For a CPU module, and for one spread over several devices, "
        "leave both out. To use several accelerators, start one process for each "
        "(torchrun --nproc-per-node=N) and pass device_ids=[local_rank]."
    )


def bad_device_ids(device_ids: object) -> TypeError:
    return TypeError(
        f"device_ids must be a list with one device, or None, but got "
        f"{type(device_ids).__name__}. Pass e.g. device_ids=[local_rank]."
    )


def bad_dim(dim: object) -> TypeError:
    return TypeError(f"dim must be a whole number, but got {type(dim).__name__}. Leave it out.")


def not_a_mesh(mesh: object) -> TypeError:
    return TypeError(
        f"device_mesh must be a torch.distributed.device_mesh.DeviceMesh or None, but got "
        f"{type(mesh).__name__}. Make one with init_device_mesh(...)."
    )


def several_device_ids(device_ids: object) -> ValueError:
    return ValueError(
        f"device_ids={device_ids} names several devices, but a process drives one. Start one "
        "process a device (torchrun --nproc-per-node=N) and pass device_ids=[local_rank]."
    )


def sync_batch_norm_on_cpu(names: Iterable[str]) -> ValueError:
    return ValueError(
        f"SyncBatchNorm works on accelerators only, but this module is on CPU: {', '.join(names)}. "
        "Move the module first, or leave out convert_sync_batchnorm on CPU."
    )


def bad_cap(name: str, value: object) -> ValueError:
    return ValueError(
        f"{name}={value!r} is no bucket size. "
        f"Pass a finite number of MiB, 0 or more, e.g. {name}=25."
    )


def bad_cap_list(value: object) -> TypeError:
    return TypeError(
        f"bucket_cap_mb_list={value!r} must be a list of numbers of MiB, e.g. [1, 25, 25]."
    )


def not_a_flag(name: str, value: object) -> TypeError:
    return TypeError(f"{name} must be True or False, but got {value!r}.")


def ranks_disagree(differences: Sequence[str], most: int = 10) -> RuntimeError:
    """``differences``: sentences, each with the values on every rank."""
    lines = [f"  {difference}" for difference in differences[:most]]
    if len(differences) > most:
        lines.append(f"  and {len(differences) - most} more")
    return RuntimeError(
        "ReducerDDP needs the same module, options and versions on every rank, but these differ:\n"
        + "\n".join(lines)
        + "\nBuild the model the same way everywhere; freeze the same parameters before wrapping."
    )


def list_ranks(ranks: Sequence[int]) -> str:
    """ "rank 1, rank 2"; of many, the first ones and how many there are."""
    shown = ", ".join(f"rank {rank}" for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown}, … ({len(ranks)} ranks)"


def no_number_of_seconds(name: str, value: object) -> TypeError:
    return TypeError(f"{name} must be a number of seconds, but got {value!r}.")


def bad_seconds(name: str, value: object) -> ValueError:
    return ValueError(
        f"{name}={value!r} is no time to wait. Pass seconds, from 0.001 to 1e9, e.g. 10; or inf "
        "for as long as it takes."
    )


def bad_switch(variable: str, text: str) -> ValueError:
    return ValueError(f"{variable}={text} says neither on nor off. Set it to 1 or 0.")


def no_other_rank(rank: object, size: int) -> ValueError:
    return ValueError(
        f"rank {rank!r} is not another rank of this wrapper's process group, which has {size} "
        "ranks. Pass one from 0 on, but not this rank's own."
    )


def no_wrapper(value: object) -> TypeError:
    return TypeError(f"pass the ReducerDDP that wraps the model, but not {type(value).__name__}.")


def nobody_watches() -> RuntimeError:
    return RuntimeError(
        "nobody watches over the ranks of this wrapper: it is alone, its process group has no "
        "store, or DDPX_HEALTH=0 is set."
    )


def not_default_group() -> RuntimeError:
    return RuntimeError(
        "a ReducerDDP can be pickled or copied only if it uses the default process group, because "
        "a process group cannot be pickled. Save wrapper.module.state_dict() instead."
    )


def params_wrapped_elsewhere(names: Iterable[str]) -> ValueError:
    return ValueError(
        "these parameters are averaged already by another ReducerDDP, together with others or "
        f"over another process group: {', '.join(names)}. Wrap one module that holds all of "
        "them, or delete the other wrapper first."
    )


def params_replaced(names: Iterable[str]) -> RuntimeError:
    return RuntimeError(
        f"these parameters are new since the module was wrapped, so that their gradients would not "
        f"be averaged: {', '.join(names)}. Replace layers before wrapping, or wrap again: "
        "model = ReducerDDP(model.module, ...)."
    )


def not_averaged_here() -> ValueError:
    return ValueError(
        "register_post_sync_hook() got a parameter or module of which this wrapper averages "
        "nothing. Pass a parameter of the wrapped module that requires a gradient, or one of its "
        "submodules."
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
        f"Communication hook: bucket annotation should be dist.GradBucket. It is {annotation!r}."
    )


def hook_return_annotation(annotation: object) -> ValueError:
    return ValueError(
        "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. "
        f"It is {annotation!r}."
    )


def hook_without_future(returned: object) -> TypeError:
    return TypeError(
        f"Communication hook: expected a torch.futures.Future to be returned, but got "
        f"{type(returned).__name__}. Return the future of a collective, with .then() to pick its "
        "tensor, or a torch.futures.Future with its result set."
    )


def optimizer_does_not_overlap(optim: object) -> RuntimeError:
    return RuntimeError(
        f"{optim} does not support overlapped DDP: torch has no functional form of it. "
        "Use it after backward, as usual."
    )


def group_and_mesh() -> RuntimeError:
    return RuntimeError("Cannot specify both process_group and device_mesh arguments. Pass one.")


def param_not_given(name: str) -> ValueError:
    return ValueError(
        f"Param with name {name} is averaged, but was not given. "
        "Pass what _build_params_for_reducer() returns."
    )


def params_not_managed(num_given: int, num_managed: int) -> ValueError:
    return ValueError(
        f"Expected param to name mapping to be asked for the {num_managed} parameters that are "
        f"averaged, but got {num_given}. Pass what _build_params_for_reducer() returns."
    )


def not_a_1d_mesh(mesh: object) -> RuntimeError:
    return RuntimeError(
        f"Only 1D device mesh is supported, but got {mesh}. Pass the dimension to average over, "
        "e.g. mesh['dp']."
    )


def bad_sample_rate(rate: object) -> ValueError:
    return ValueError(
        f"DDP runtime logging sample rate should be equal or greater than 1, but got {rate!r}."
    )


def bad_mixed_precision(config: object, field: str) -> TypeError:
    return TypeError(
        f"mixed_precision={config!r} has no valid {field}. Pass an object with param_dtype, "
        "reduce_dtype and buffer_dtype, each a floating-point torch.dtype or None, such as "
        "torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16)."
    )


def group_held_by_hook() -> RuntimeError:
    return RuntimeError(
        "_update_process_group() cannot be used with mixed_precision or a built-in communication "
        "hook: they hold the process group that they were made with. Wrap the module again."
    )


def delayed_without_hook_param() -> ValueError:
    return ValueError(
        "delay_all_reduce_named_params and param_to_hook_all_reduce "
        "need to be set at the same time."
    )


def cannot_delay(name: str) -> ValueError:
    return ValueError(
        f"delay_all_reduce_named_params names {name!r}, which is not a parameter of the module "
        "that requires a gradient. Pass (name, param) pairs of module.named_parameters()."
    )


def cannot_hook_all_reduce() -> ValueError:
    return ValueError(
        "param_to_hook_all_reduce is not a parameter of the module that requires a gradient, so "
        "that its gradient could not start the delayed all-reduce. Pass one of module.parameters()."
    )


def unknown_sparse_param(name: str) -> ValueError:
    return ValueError(
        f"_set_sparse_metadata() got ids for {name!r}, which is not a parameter with sparse "
        "gradients. Pass names of the weights of nn.Embedding(..., sparse=True)."
    )


def bad_shm_order(order: object) -> ValueError:
    return ValueError(
        f"the shm backend knows no order {order!r}. Pass 'gloo' (gloo's bits) or 'fixed' (sums by "
        "rank, whatever the bucket), in ddpx.ShmOptions(order=...) or in DDPX_SHM_ORDER."
    )


def bad_shm_options(options: object) -> TypeError:
    return TypeError(
        f"the shm backend takes a ddpx.ShmOptions as pg_options, but got {type(options).__name__}."
    )


def derived_too_early(cls: type) -> RuntimeError:
    return RuntimeError(
        f"{cls.__module__}.{cls.__qualname__} was derived from torch's DistributedDataParallel "
        "before ddpx.patch_ddp() was called, so it would train with DDP. Call ddpx.patch_ddp() "
        f"before {cls.__module__} is imported."
    )


def patched_with_another(present: type, wrapper: type) -> RuntimeError:
    return RuntimeError(
        f"patch_ddp({wrapper.__name__}): {present.__name__} is in the place of "
        "DistributedDataParallel. Undo that replacement first."
    )


def not_linux(platform: str) -> ImportError:
    return ImportError(f"ddpx runs on Linux, and this is {platform}.")


def not_built() -> ImportError:
    return ImportError(
        "the C++ extension of ddpx has not been built for this Python. In a checkout run "
        "make build; elsewhere install ddpx again: pip install --no-build-isolation PATH"
    )


def built_for_another_torch(built_for: str, installed: str) -> ImportError:
    return ImportError(
        f"ddpx was built for torch {built_for}, and torch {installed} is installed. Install torch "
        f"{built_for.split('+')[0]}, or build ddpx again: make clean build in a checkout, "
        "pip install --no-build-isolation --force-reinstall --no-deps PATH elsewhere."
    )
