"""Arguments of ReducerDDP: the same as those of DDP, with clear errors for invalid ones."""

from __future__ import annotations

import inspect
import math
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from ddpx import ReducerDDP, bucket_plan, settings
from ddpx.ddp.arguments import agreement, options


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _names(cls: type) -> list[str]:
    return list(inspect.signature(cls.__init__).parameters)


def test_arguments_stand_in_ddps_order():
    """A torch older than 2.15 has fewer arguments, in the same order."""
    theirs = _names(DistributedDataParallel)
    assert _names(ReducerDDP)[: len(theirs)] == theirs


def test_arguments_of_ddpx_are_keyword_only():
    with pytest.raises(TypeError, match="positional arguments"):
        ReducerDDP(nn.Linear(2, 2), *[None] * 20, torch.float32)


def test_defaults_are_ddps():
    ours = inspect.signature(ReducerDDP.__init__).parameters
    for name, parameter in inspect.signature(DistributedDataParallel.__init__).parameters.items():
        assert ours[name].default == parameter.default or name == "broadcast_buffers"


def test_is_an_instance_of_ddp_without_inheriting():
    model = ReducerDDP(nn.Linear(2, 2))
    assert isinstance(model, DistributedDataParallel)
    assert DistributedDataParallel not in type(model).__mro__


def test_calls_of_older_tutorials():
    model = ReducerDDP(nn.Linear(2, 2), broadcast_buffers=True, bucket_cap_mb=25)
    assert model.broadcast_buffers
    assert model.bucket_bytes_cap == 25 * 1024 * 1024
    assert ReducerDDP(nn.Linear(2, 2), None, None, 0, True).device_ids is None


@pytest.mark.parametrize(
    "arguments, cap_mb, is_default",
    [
        ({}, 25, True),
        ({"bucket_cap_mb": 25}, 25, False),
        ({"bucket_cap_mb_list": [1, 2, 0.5]}, 2, False),
        ({"bucket_cap_mb_list": []}, 25, True),
    ],
)
def test_attributes_of_bucket_sizes(arguments, cap_mb, is_default):
    model = ReducerDDP(nn.Linear(2, 2), **arguments)
    assert model.bucket_bytes_cap == cap_mb * 1024 * 1024
    assert model.bucket_bytes_cap_default == is_default


def test_a_negative_size_is_no_limit():
    for cap_mb, num_buckets in ((-2, 1), (0, 4)):
        layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model = ReducerDDP(layers, bucket_cap_mb=cap_mb, find_unused_parameters=True)
        assert len(model.reducer.plan.buckets) == num_buckets


def test_sizes_of_buckets_are_a_list():
    for sizes in ({1: 25}, b"25", 25):
        with pytest.raises(TypeError, match=r"Pass e.g. \[1, 25, 25\]"):
            ReducerDDP(nn.Linear(2, 2), bucket_cap_mb_list=sizes)


def test_newer_buffer_flag_goes_before_the_older():
    with pytest.warns(FutureWarning, match="broadcast_buffers has no effect"):
        model = ReducerDDP(nn.Linear(2, 2), broadcast_buffers=True, forward_sync_buffers=False)
    assert not model.forward_sync_buffers


@pytest.mark.parametrize(
    "arguments", [{"delay_all_reduce_named_params": []}, {"param_to_hook_all_reduce": 0}]
)
def test_delayed_params_and_their_hook_come_together(arguments):
    with pytest.raises(ValueError, match="need to be set at the same time"):
        ReducerDDP(nn.Linear(2, 2), **arguments)


def test_delayed_params_are_params_of_the_module():
    model = nn.Linear(2, 2)
    stranger = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="delay_all_reduce_named_params names 'far'"):
        ReducerDDP(
            model,
            delay_all_reduce_named_params=[("far", stranger)],
            param_to_hook_all_reduce=model.weight,
        )
    with pytest.raises(ValueError, match="param_to_hook_all_reduce is not a parameter"):
        ReducerDDP(
            model,
            delay_all_reduce_named_params=[("weight", model.weight)],
            param_to_hook_all_reduce=stranger,
        )


@pytest.mark.parametrize(
    "pairs", ["weight", 3, ["weight"], [("weight",)], [("weight", 0)], {"weight": 0}]
)
def test_delayed_params_are_pairs(pairs):
    model = nn.Linear(2, 2)
    for bad in (pairs, list(model.parameters()), [(model.weight, "weight")]):
        with pytest.raises(TypeError, match=r"must be a list of pairs.* Pass \(name, param\)"):
            ReducerDDP(
                model, delay_all_reduce_named_params=bad, param_to_hook_all_reduce=model.bias
            )


def test_delayed_params_of_an_iterator():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pairs = model.named_parameters()
    wrapper = ReducerDDP(
        model,
        delay_all_reduce_named_params=((name, p) for name, p in pairs if name.startswith("1.")),
        param_to_hook_all_reduce=model[0].bias,
    )
    assert bucket_plan(wrapper).buckets[-1] == ("1.weight", "1.bias")


@pytest.mark.parametrize(
    "config, field",
    [
        (torch.float16, "param_dtype"),
        (_MixedPrecision(param_dtype=torch.int8), "param_dtype"),
        (_MixedPrecision(reduce_dtype="fp16"), "reduce_dtype"),
    ],
)
def test_bad_mixed_precision_is_named(config, field):
    with pytest.raises(TypeError, match=f"mixed_precision=.*{field}"):
        ReducerDDP(nn.Linear(2, 2), mixed_precision=config)


def test_sparse_metadata_names_sparse_params():
    with pytest.raises(ValueError, match=r"'weight', but the module has no .* with sparse grad"):
        ReducerDDP(nn.Linear(2, 2))._set_sparse_metadata({"weight": torch.zeros(1)})


def test_every_public_name_of_ddp_is_there():
    theirs = {name for name in vars(DistributedDataParallel) if not name.startswith("_")}
    assert theirs <= set(dir(ReducerDDP))


@pytest.mark.parametrize(
    "arguments",
    [{"check_reduction": True}, {"broadcast_buffers": True, "forward_sync_buffers": True}],
    ids=str,
)
def test_warnings_point_at_the_caller(arguments):
    with pytest.warns(FutureWarning) as caught:
        ReducerDDP(nn.Linear(2, 2), **arguments)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("cap", [math.nan, math.inf, "25"], ids=str)
def test_bad_cap(cap):
    with pytest.raises(ValueError, match=r"bucket_cap_mb=.*finite number of MiB"):
        ReducerDDP(nn.Linear(2, 2), bucket_cap_mb=cap)
    with pytest.raises(ValueError, match=r"bucket_cap_mb_list=.*finite number of MiB"):
        ReducerDDP(nn.Linear(2, 2), bucket_cap_mb_list=[1, cap])


def test_bad_cap_list():
    with pytest.raises(TypeError, match="list of numbers of MiB"):
        ReducerDDP(nn.Linear(2, 2), bucket_cap_mb_list=25)


@pytest.mark.parametrize(
    "name", ["find_unused_parameters", "static_graph", "gradient_as_bucket_view", "init_sync"]
)
def test_bad_flag(name):
    with pytest.raises(TypeError, match=f"{name} must be True or False"):
        ReducerDDP(nn.Linear(2, 2), **{name: "yes"})


def test_not_a_module():
    with pytest.raises(TypeError, match="Pass the model itself"):
        ReducerDDP([nn.Linear(2, 2)])


def test_not_a_process_group():
    with pytest.raises(TypeError, match="new_group"):
        ReducerDDP(nn.Linear(2, 2), process_group="gloo")


def test_rank_outside_group():
    with pytest.raises(ValueError, match="not a member"):
        ReducerDDP(nn.Linear(2, 2), process_group=dist.GroupMember.NON_GROUP_MEMBER)


def test_nothing_to_train():
    for module in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
        with pytest.raises(RuntimeError, match="unfreeze parameters before wrapping"):
            ReducerDDP(module)


def test_lazy_params():
    with pytest.raises(RuntimeError, match=r"Run a dummy forward.*weight, bias"):
        ReducerDDP(nn.LazyLinear(2))


@pytest.mark.parametrize("ids", [[0], [0, 1]], ids=str)
def test_device_ids_on_cpu_name_the_fix(ids):
    with pytest.raises(ValueError, match=r"nproc-per-node=N.*device_ids=\[local_rank\]"):
        ReducerDDP(nn.Linear(2, 2), device_ids=ids)


def test_several_device_ids_name_the_fix(monkeypatch):
    """With accelerators, where the module lies on one of them: the device is pretended."""
    from ddpx.ddp.arguments import placement

    module = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match=r"one process per device.*device_ids=\[local_rank\]"):
        placement.place(module, (), [0, 1], None)


@pytest.mark.parametrize(
    "ids", [[1], (np.int64(1),), np.array([1]), [torch.device("cuda", 1)], ["cuda:1"], range(1, 2)]
)
def test_device_ids_of_an_accelerator(ids):
    """The device is pretended."""
    from ddpx.ddp.arguments import placement

    place = placement.place(nn.Linear(2, 2, device="meta"), (), ids, None)
    assert (place.device_ids, place.output_device) == ([1], 1)
    assert type(place.device_ids[0]) is int


def test_output_device_on_cpu():
    with pytest.raises(ValueError, match="leave both out"):
        ReducerDDP(nn.Linear(2, 2), output_device=1)


def test_devices_of_two_types():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="locate in cpu, meta"):
        ReducerDDP(module)


def test_parameters_that_are_ignored_may_be_on_another_device():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    ReducerDDP._set_params_and_buffers_to_ignore_for_model(module, ["1.weight", "1.bias"])
    assert ReducerDDP(module).device.type == "cpu"


@pytest.mark.parametrize(
    "argument", [{"device_ids": "0"}, {"device_ids": {0: 0}}, {"output_device": []}]
)
def test_no_devices(argument):
    with pytest.raises(TypeError, match=rf"{next(iter(argument))} must be a"):
        ReducerDDP(nn.Linear(2, 2), **argument)


def test_sync_batch_norm_on_cpu():
    with pytest.raises(ValueError, match=r"SyncBatchNorm.*: 1\b"):
        ReducerDDP(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
    with pytest.raises(ValueError, match=r"SyncBatchNorm.*: the module itself\."):
        ReducerDDP(nn.SyncBatchNorm(2))


def test_without_process_group(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match="init_process_group"):
        ReducerDDP(nn.Linear(2, 2))


def test_pickling_needs_the_default_group():
    model = ReducerDDP(nn.Linear(2, 2), process_group=dist.new_group([0]))
    with pytest.raises(RuntimeError, match=r"wrapper\.module\.state_dict"):
        pickle.dumps(model)


def test_a_construction_that_failed_claims_no_parameter():
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="cannot hold gradients") as error:
        ReducerDDP(module, grad_dtype=torch.bfloat16)
    model = ReducerDDP(nn.Sequential(module))
    model(torch.ones(1, 2)).sum().backward()
    assert error.value.__traceback__ is not None  # which holds the wrapper that failed


@pytest.mark.parametrize("text, expected", [("", 7), ("0", 0), ("4096", 4096)])
def test_a_number_of_bytes(monkeypatch, text, expected):
    monkeypatch.setenv("DDPX_SMALL_GRAD_BYTES", text)
    assert settings.bytes_of("DDPX_SMALL_GRAD_BYTES", default=7) == expected


@pytest.mark.parametrize("text", ["-1", "1 MiB", "1e3", "9" * 25])
def test_no_number_of_bytes(monkeypatch, text):
    monkeypatch.setenv("DDPX_SMALL_GRAD_BYTES", text)
    with pytest.raises(ValueError, match=f"DDPX_SMALL_GRAD_BYTES={text} is not a number of bytes"):
        settings.bytes_of("DDPX_SMALL_GRAD_BYTES", default=7)


def test_a_default_average_ends_with_its_block():
    def average() -> str:
        return options.make_options().average

    with pytest.raises(KeyError), options.default_average("sum"):
        assert average() == "sum"
        raise KeyError
    assert average() == "mean"


def test_more_than_eight_ranks_are_counted():
    reports = [{"option": "1" if rank == 9 else "2"} for rank in range(10)]
    (text,) = agreement._differences(reports)
    ranks = ", ".join(f"rank {rank}" for rank in range(8))
    assert text == f"option: 2 on {ranks}, … (9 ranks); 1 on rank 9"
