"""An extension that does not match torch is refused with a clear error, before it is loaded."""

from __future__ import annotations

import json

import pytest

from ddpx import build_info


def _says(monkeypatch, tmp_path, torch_version):
    facts = {"torch": torch_version, "compiler": "c++ 1", "date": "2026-01-01 00:00 UTC"}
    file = tmp_path / "build.json"
    file.write_text(json.dumps(facts))
    (tmp_path / f"_C{build_info.EXTENSION_SUFFIXES[0]}").touch()
    monkeypatch.setattr(build_info, "_FILE", file)


def test_another_torch_is_named_beside_the_one_that_it_was_built_for(monkeypatch, tmp_path):
    _says(monkeypatch, tmp_path, "2.12.1+cpu")
    monkeypatch.setattr("torch.__version__", "2.13.0+cu130")
    with pytest.raises(ImportError, match=r"built for torch 2\.12\.1\+cpu, but torch 2\.13\.0\+cu"):
        build_info.check_build()


def test_a_patch_release_fits(monkeypatch, tmp_path):
    _says(monkeypatch, tmp_path, "2.13.0+cpu")
    monkeypatch.setattr("torch.__version__", "2.13.1")
    build_info.check_build()


def test_what_was_not_built_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(build_info, "_FILE", tmp_path / "build.json")
    with pytest.raises(ImportError, match="has not been built for this Python"):
        build_info.check_build()


def test_another_system_is_named(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(ImportError, match="runs on Linux only, but this system is darwin"):
        build_info.check_build()


def test_the_build_says_what_it_was():
    facts = build_info.build_facts()
    assert facts is not None and facts.torch and facts.compiler and facts.date.endswith("UTC")
