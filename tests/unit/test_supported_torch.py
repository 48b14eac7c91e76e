"""The supported versions of torch: one source, and no warnings on these versions."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from ddpx import build_info, version
from ddpx.cli.info import gather

ROOT = Path(__file__).resolve().parents[2]
TOO_OLD = "2.10.1+cpu"
NEWER = f"2.{version.NEWEST_TORCH[1] + 1}.0"


def _run_build() -> None:
    """Runs the file that describes the build for setup.py."""
    spec = importlib.util.spec_from_file_location("build_description", ROOT / "csrc/extension.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _read(file: str) -> str:
    return (ROOT / file).read_text()


# ---- one source ----------------------------------------------------------------------------------


@pytest.mark.parametrize("installed", [TOO_OLD, "2.11.0", "2.15.0", NEWER, "2.15.0a0+git1234567"])
def test_the_dependency_in_the_metadata_agrees(installed):
    """pip replaces a torch that the metadata excludes, although the extension was built for it."""
    found = re.search(r'^dependencies = \["torch(.*?)"\]', _read("pyproject.toml"), re.MULTILINE)
    assert found is not None
    accepted = SpecifierSet(found[1]).contains(installed, prereleases=True)
    assert accepted == (version.refusal_of(installed) is None)


@pytest.mark.parametrize("file", ["README.md", "docs/compatibility.md", "scripts/gpu.py"])
def test_texts_agree(file):
    found = re.findall(r"torch,? (\d\.\d+ to \d\.\d+)", _read(file))
    assert found == [version.supported_torch()]


def test_info_agrees():
    facts = gather(probe=False)["versions"]
    assert facts["supported torch"] == version.supported_torch() == "2.11 to 2.15"


def test_the_pinned_torch_is_supported():
    pinned = re.search(r"^torch==(.*)$", _read("requirements.lock"), re.MULTILINE)
    assert pinned is not None
    assert version.refusal_of(pinned[1]) is None and version.warning_of(pinned[1]) is None


# ---- other versions ------------------------------------------------------------------------------


@pytest.mark.parametrize("installed", ["2.11.0", "2.13.1+cu130", "2.15.0a0+git1234567"])
def test_supported(installed, monkeypatch, capsys):
    monkeypatch.setattr("torch.__version__", installed)
    _run_build()
    assert capsys.readouterr().out == ""


def test_an_older_torch_is_refused_at_build(monkeypatch):
    monkeypatch.setattr("torch.__version__", TOO_OLD)
    with pytest.raises(SystemExit, match=r"supports torch 2\.11 to 2\.15, but torch 2\.10\.1\+cpu"):
        _run_build()


def test_an_older_torch_is_refused_at_import(monkeypatch):
    monkeypatch.setattr("torch.__version__", TOO_OLD)
    with pytest.raises(ImportError, match=r"supports torch 2\.11 to 2\.15, but torch 2\.10\.1\+cp"):
        build_info.check_build()


def test_a_newer_torch_brings_one_warning_at_build(monkeypatch, capsys):
    monkeypatch.setattr("torch.__version__", NEWER)
    _run_build()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: ddpx ")
    assert f"supports torch {version.supported_torch()}, but torch {NEWER} is installed" in line


# ---- no warnings on supported versions -----------------------------------------------------------


def _run(folder: Path, code: str) -> str:
    """Runs Python with warnings as errors. Returns what it wrote to stderr."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_importing_brings_no_warning(tmp_path):
    said = _run(tmp_path, "import torch.distributed.nn.functional")
    assert _run(tmp_path, "import ddpx") == said


_TRAIN = """
import sys, warnings
import torch, torch.distributed as dist
from torch import nn
import ddpx

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of torch itself
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
groups = (None, dist.new_group(backend="shm"))
for group in groups:
    model = ddpx.ReducerDDP(nn.Linear(2, 2), process_group=group)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
"""


def test_training_brings_no_warning(tmp_path):
    said = _run(tmp_path, _TRAIN)
    assert "arning" not in said and "deprecated" not in said, said
