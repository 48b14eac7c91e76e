"""Attributes that DDP has in some modes only."""

import pytest
import torch
from both_wrappers import WRAPPERS, Mlp
from test_ddp_names import ATTRIBUTES, NEWER, REFUSED_ATTRIBUTES
from torch import nn

_MODES = {
    "static graph": ({"static_graph": True}, {"_static_graph_delay_allreduce_enqueued"}),
    "unused params": ({"find_unused_parameters": True}, set()),
    "views": ({"gradient_as_bucket_view": True}, set()),
    "own buckets": ({"bucket_cap_mb": 1}, set()),
}


def _check(mode: str) -> None:
    options, more = _MODES[mode]
    plain = set(vars(nn.Linear(1, 1)))
    theirs, ours = (cls(Mlp(), **options) for cls in WRAPPERS)
    for model in (theirs, ours):
        model(torch.ones(1, 16)).sum().backward()
    assert set(vars(theirs)) - plain == ((ATTRIBUTES | REFUSED_ATTRIBUTES) - NEWER) | more
    for name in more:
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
        model._static_graph_delay_allreduce_enqueued = True  # as code of DDP's backward does
    assert found[0] == found[1] == [False, False, True, True, True]


@pytest.mark.wrapper_only
def test_the_first_backward_of_a_static_graph(ranks):
    ranks(2).run(_check_moments)
