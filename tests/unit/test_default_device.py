"""``torch.set_default_device()`` of a script does not move tensors that ddpx makes for itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

import ddpx
from ddpx.ddp.search.events import arrivals_of
from ddpx.planning import Gradient, ReduceCost
from ddpx.planning.partition import best_partition

PACKAGE = Path(ddpx.__file__).parent
# The functions of torch that use the default device if they get no device.
FACTORIES = {f"torch.{function.__name__}" for function in _device_constructors()}


def _calls_without_device(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        has_device = any(keyword.arg == "device" for keyword in node.keywords)
        if name in FACTORIES and not has_device:
            yield f"{path.relative_to(PACKAGE)}:{node.lineno}: {name}"


def test_each_factory_gets_a_device() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 100
    assert [call for path in paths for call in _calls_without_device(path)] == []


def test_a_call_without_device_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "made.py").write_text("a = torch.zeros(1)\nb = torch.ones(1, device=a.device)\n")
    assert list(_calls_without_device(tmp_path / "made.py")) == ["made.py:1: torch.zeros"]


def test_plans_are_computed_on_the_cpu() -> None:
    gradients = [Gradient(100 * number, 0.1 * number) for number in range(1, 5)]

    def plan() -> list[int]:
        cost = ReduceCost([(1_000, 0.001), (3_000, 0.002)])
        assert cost(2_000) == 0.0015
        return best_partition(gradients, cost)

    expected = plan()
    with torch.device("meta"):
        assert plan() == expected


def test_arrivals_are_read_on_the_cpu() -> None:
    kinds = ddpx._C.EventKind
    rows = [(0, 3, int(kinds.BACKWARD_BEGIN), 0), (2_000, 3, int(kinds.GRAD_ARRIVED), 1)]
    events = torch.tensor(rows)
    with torch.device("meta"):
        assert arrivals_of(events, range(3, 4), 2) == [0.0, pytest.approx(2e-6)]
