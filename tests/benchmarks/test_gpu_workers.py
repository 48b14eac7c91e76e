"""The test processes of ``make gpu``, on made-up tests without a GPU."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "scripts")]

import gpu_workers  # noqa: E402
from gpu_workers import Workers, collect  # noqa: E402

pytestmark = pytest.mark.timeout(120)

CONFTEST = """
def pytest_addoption(parser, pluginmanager):
    parser.addoption("--full", action="store_true")
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "", default="0")
"""
TESTS = """
import os, signal, time
import pytest

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("size", [1, 2, 3])
def test_size(size):
    assert size < 3, "three are one too many"

@pytest.mark.skip(reason="a reason to skip")
def test_skipped():
    pass

@pytest.fixture
def broken():
    raise RuntimeError("a broken fixture")

def test_with_it(broken):
    pass

@pytest.fixture(scope="module")
def shared():
    return []

@pytest.mark.parametrize("number", [0, 1])
def test_shared(shared, number):
    shared.append(number)
    assert len(shared) == number + 1

def test_dies():
    os._exit(3)

def test_hangs():
    time.sleep(600)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_workers, "ROOT", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    return tmp_path


def _run(names: list[str], number: int = 2, limit_s: float = 60.0) -> tuple[dict[str, Any], str]:
    """The results by name, and the error of all processes."""
    results: dict[str, Any] = {}
    tests = [f"test_it.py::{name}" for name in names]
    workers = Workers(tests, number, lambda test, result: results.update({test: result}), {})
    error = workers.run(limit_s)
    return {test.partition("::")[2]: result for test, result in results.items()}, error


def test_outcomes_and_texts(project: Path) -> None:
    names = ["test_size[1]", "test_size[3]", "test_skipped", "test_with_it", "test_gone"]
    results, error = _run(names)
    assert error == ""
    outcomes = {name: result["outcome"] for name, result in results.items()}
    assert outcomes == dict(
        zip(names, ["passed", "failed", "skipped", "failed", "failed"], strict=True)
    )
    assert results["test_size[1]"]["text"] == ""
    assert results["test_size[3]"]["text"].startswith("AssertionError: three are one too many")
    assert results["test_skipped"]["text"] == "a reason to skip"
    assert "a broken fixture" in results["test_with_it"]["text"]
    assert results["test_gone"]["text"] == "pytest did not collect this test"


def test_fixtures_live_on_from_test_to_test(project: Path) -> None:
    results, _ = _run(["test_shared[0]", "test_shared[1]"], number=1)
    assert {result["outcome"] for result in results.values()} == {"passed"}


def test_a_test_that_ends_its_process_does_not_stop_the_others(project: Path) -> None:
    results, error = _run(["test_dies", "test_size[1]", "test_size[2]"], number=1)
    assert error == ""
    assert results["test_dies"]["outcome"] == "failed"
    assert results["test_dies"]["text"].startswith("the test process ended (exit code 3)")
    assert results["test_size[1]"]["outcome"] == results["test_size[2]"]["outcome"] == "passed"


def test_a_test_that_hangs_does_not_stop_the_others(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test's own time limit has no effect, as if the test hung in C++."""
    monkeypatch.setattr(gpu_workers, "_GRACE_S", 2.0)
    hang = "@pytest.mark.timeout(1)\ndef test_hangs"
    blocked = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]); time.sleep(600)"
    text = TESTS.replace("def test_hangs", hang).replace("time.sleep(600)", blocked)
    (project / "test_it.py").write_text(text)
    results, error = _run(["test_hangs", "test_size[1]"], number=1)
    assert error == ""
    assert results["test_hangs"]["text"].startswith("hung beyond its time limit")
    assert results["test_size[1]"]["outcome"] == "passed"


def test_at_the_time_limit_a_test_that_runs_has_no_result(project: Path) -> None:
    start = time.monotonic()
    results, error = _run(["test_size[1]", "test_hangs"], number=1, limit_s=8.0)
    assert time.monotonic() - start < 30
    assert error == "" and list(results) == ["test_size[1]"]


def test_an_error_if_no_process_can_run_tests(project: Path) -> None:
    (project / "conftest.py").write_text("raise RuntimeError('a broken conftest')")
    results, error = _run(["test_size[1]"])
    assert results == {} and "a broken conftest" in error


def test_all_tests_are_collected(project: Path) -> None:
    (project / "test_other.py").write_text("import a_module_that_nobody_has")
    (project / "test_broken.py").write_text("import a_module_that_nobody_has  # mark.gpu")
    tests, short, errors = collect()
    assert len(tests) == 9 and tests == short and tests[0] == "test_it.py::test_size[1]"
    assert list(errors) == ["test_broken.py"]
    assert "a_module_that_nobody_has" in errors["test_broken.py"]
