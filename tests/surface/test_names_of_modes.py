"""Attributes that DDP has in some modes only."""

import pytest
import torch
from both_wrappers import WRAPPERS, Mlp
from test_ddp_names import ATTRIBUTES, NEWER, REFUSED_ATTRIBUTES
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

# No code outside DDP's forward reads them: torch's own copies of parameters for mixed precision.
_OF_MIXED_PRECISION = {"_mp_stream", "_submodule_to_event"}
_MODES = {
    "static graph": ({"static_graph": True}, {"_static_graph_delay_allreduce_enqueued"}),
    "unused params": ({"find_unused_parameters": True}, set()),
    "views": ({"gradient_as_bucket_view": True}, set()),
    "mixed precision": (
        {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)},
        _OF_MIXED_PRECISION,
    ),
    "own buckets": ({"bucket_cap_mb": 1}, set()),
}


def _check(mode: str) -> None:
    options, more = _MODES[mode]
    plain = set(vars(nn.Linear(1, 1)))
    theirs, ours = (cls(Mlp(), **options) for cls in WRAPPERS)
    for model in (theirs, ours):
        if mode != "mixed precision":  # DDP's needs a device with events
            model(torch.ones(1, 16)).sum().backward()
    assert set(vars(theirs)) - plain == ((ATTRIBUTES | REFUSED_ATTRIBUTES) - NEWER) | more
    for name in more - _OF_MIXED_PRECISION:
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.wrapper_only
@pytest.mark.parametrize("mode", _MODES)
def test_attributes_of_a_mode(ranks, mode):
    """A new one in a release of torch must be added here, and to ReducerDDP."""
    ranks(1).run(_check, mode)


def _check_moments() -> None:
    found = []
    for cls in WRAPPERS:
        model = cls(Mlp(), static_graph=True)
        moments = [model._static_graph_delay_allreduce_enqueued]
        for _ in range(2):
            output = model(torch.ones(1, 16)).sum()
            moments.append(model._static_graph_delay_allreduce_enqueued)
            output.backward()
            moments.append(model._static_graph_delay_allreduce_enqueued)
        found.append(moments)
    assert found[0] == found[1] == [False, False, True, True, True]


@pytest.mark.wrapper_only
def test_the_first_backward_of_a_static_graph(ranks):
    ranks(2).run(_check_moments)
