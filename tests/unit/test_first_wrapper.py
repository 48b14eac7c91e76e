"""What the first wrapper of a process checks and starts."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

import ddpx
from ddpx.health import ending


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, as before the first wrapper. A group stands for its monitor."""
    module: Any = sys.modules["ddpx.health.watch"]
    monkeypatch.setattr(module, "_started", threading.Lock())
    monkeypatch.setattr(module._C, "monitor_of", lambda group: group)
    monkeypatch.setattr(module.log, "start", lambda: None)
    monkeypatch.setattr(module.ending, "publish_end", lambda: None)
    return module


@pytest.mark.parametrize("variable", ["DDPX_HEALTH", "DDPX_HOST_LEASE", "DDPX_STALL_WARN"])
def test_wrong_variables_are_named(
    watch: ModuleType, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "soon")
    with pytest.raises(ValueError, match=f"^{variable}="):
        ddpx.health.watch(cast(Any, object()))


def test_a_forked_child_starts_again(watch: ModuleType) -> None:
    """Threads of the parent do not exist in the child."""
    ddpx.health.watch(cast(Any, object()))
    assert watch._started.locked()
    child = os.fork()
    if child == 0:
        os._exit(watch._started.locked())
    assert os.waitpid(child, 0)[1] == 0


def test_an_error_does_not_end_an_interactive_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_rank_pid", os.getpid())
    hook = cast(FrameType, SimpleNamespace(f_back=None))
    assert ending._ends_the_script(hook)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert not ending._ends_the_script(hook)
