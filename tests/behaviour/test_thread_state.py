"""ddpx leaves no state on a thread that autograd would copy for each node of a later backward."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpx

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
}


def _has_functorch_state() -> bool:
    """Whether functorch has allocated its state of this thread."""
    torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    accessor = torch_cpu["_ZN2at9functorch20functorchTLSAccessorEv"]
    accessor.restype = ctypes.c_void_p
    return ctypes.c_void_p.from_address(accessor()).value is not None


def _train(options: dict[str, Any]) -> list[bool]:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = ddpx.ReducerDDP(module, **options)
    with ddpx.record(model):
        for step in range(4):
            if step == 2 and not options.get("static_graph"):
                with model.no_sync():
                    model(torch.randn(3, 4)).sum().backward()
            model(torch.randn(3, 4)).sum().backward()
    with model.join():
        for _ in range(1 + dist.get_rank()):
            model(torch.randn(3, 4)).sum().backward()
    model.eval()
    model(torch.randn(3, 4))
    model.state_dict()
    has_state = _has_functorch_state()
    torch.func.vmap(torch.sin)(torch.randn(3))
    return [has_state, _has_functorch_state()]


def _in_new_thread(options: dict[str, Any]) -> list[bool]:
    with ThreadPoolExecutor(1) as new_thread:
        return new_thread.submit(_train, options).result()


@pytest.mark.parametrize("mode", MODES)
def test_training_leaves_no_state_of_functorch(ranks: Any, mode: str) -> None:
    assert ranks(2).run(_in_new_thread, MODES[mode]) == [[False, True]] * 2
