"""A forward captured by a CUDA graph is refused if a step must read results on the host.

The test simulates a torch older than 2.12, a module on CUDA, and a captured stream.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ddpx import ReducerDDP


def _texts(options: dict[str, Any], check_finite: bool, no_sync: bool) -> list[str]:
    """The errors of three steps. The middle step is captured."""
    model = ReducerDDP(nn.Linear(4, 4), **options)
    model.set_check_finite(check_finite)
    model.device_type = "cuda"
    texts = []
    for step in range(3):
        captured = mock.patch("torch.cuda.is_current_stream_capturing", return_value=step == 1)
        hidden = mock.patch("ddpx.ddp.forward._CAPTURE_IS_HIDDEN", True)
        with hidden, captured, model.no_sync() if no_sync else nullcontext():
            try:
                model(torch.ones(2, 4)).sum().backward()
                texts.append("")
            except RuntimeError as error:
                texts.append(str(error))
    return texts


@pytest.mark.parametrize(
    "options, check_finite, refused",
    [
        ({"find_unused_parameters": True}, False, "find_unused_parameters"),
        ({}, True, "set_check_finite()"),
        ({}, False, None),
        ({"static_graph": True}, False, None),
    ],
    ids=["find unused", "check_finite", "default", "static"],
)
@pytest.mark.parametrize("no_sync", [False, True], ids=["", "no_sync"])
def test_forward_under_capture(ranks, options, check_finite, refused, no_sync):
    for texts in ranks(2).run(_texts, options, check_finite, no_sync):
        assert texts[0] == texts[2] == ""
        if refused is None or no_sync:
            assert texts[1] == ""
        else:
            assert "CUDA graph" in texts[1] and refused in texts[1]
