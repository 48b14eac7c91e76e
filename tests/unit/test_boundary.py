"""Types that cross between Python and the extension."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ddpx import _C


def _make_reducer(group: dist.ProcessGroup) -> _C.Reducer:
    param = _C.ReducerParam(nn.Parameter(torch.ones(3)), "weight")
    caps = _C.BucketCaps(1, 1)
    return _C.Reducer([param], group, None, _C.ReducerOptions(caps, _C.GraphMode.DEFAULT))


def test_process_group_crosses(tmp_path):
    """Raises TypeError if the extension was built with another pybind11 than torch."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert _make_reducer(dist.group.WORLD).phase == _C.Phase.IDLE
    finally:
        dist.destroy_process_group()
