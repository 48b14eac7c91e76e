"""scripts/test_torch.py fails if a version of torch cannot be installed."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]


def _no_version(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("no such version")


def test_a_version_that_cannot_be_installed_is_a_failure(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    for name in ("PYTHONPATH", "PYTHONSAFEPATH"):  # main() changes them; restored after the test
        monkeypatch.setenv(name, os.environ.get(name, ""))
    script = importlib.import_module("test_torch")
    monkeypatch.setattr(script, "build", lambda *_: [Path("ddpx.tar.gz")])
    monkeypatch.setattr(script, "installed", _no_version)
    monkeypatch.setattr("sys.argv", ["test_torch.py", "9.9.0"])
    assert script.main() == 1
    assert "torch 9.9.0: FAILED\nno such version" in capsys.readouterr().out
