"""Every call of ``ddpx._C`` returns or raises. None crashes or hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_bindings import NOT_MADE, PARTS, targets

from ddpx import _C

PROGRAM = Path(__file__).with_name("fuzz_bindings.py")
SHORT = {"seeds": [1], "examples": 150, "limit_s": 100}
LONG = {"seeds": range(1, 9), "examples": 4000, "limit_s": 1500}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    form = LONG if metafunc.config.getoption("--full") else SHORT
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", form["seeds"])
        metafunc.parametrize("examples, limit_s", [(form["examples"], form["limit_s"])])


def run_fuzz(seed: int, examples: int, limit_s: float, log: Path) -> None:
    """Runs in a process of its own, so that a crash is a failure that names the calls."""
    command = [sys.executable, PROGRAM, f"--seed={seed}", f"--examples={examples}", f"--log={log}"]
    with log.with_suffix(".out").open("w+") as output:
        try:
            ended = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=limit_s, check=False
            )
            how = f"ended with {ended.returncode}" if ended.returncode else ""
        except subprocess.TimeoutExpired:
            how = f"did not end within {limit_s} s"
        output.seek(0)
        said = output.read()
    if how:
        calls = log.read_text() if log.exists() else ""
        pytest.fail(
            f"{how}; the calls of this example, the last at fault:\n{calls}\n{said}", pytrace=False
        )
    assert f"{examples} examples" in said


@pytest.mark.timeout(1600)
def test_fuzz(seed: int, examples: int, limit_s: float, tmp_path: Path) -> None:
    run_fuzz(seed, examples, limit_s, tmp_path / "calls")


def test_every_class_is_made() -> None:
    """The fuzz must create every class to call its methods.

    Exceptions are listed with the reason.
    """
    classes = {name for name, value in vars(_C).items() if isinstance(value, type)}
    enums = {name for name in classes if hasattr(getattr(_C, name), "__members__")}
    constructed = {target.owner for target in targets() if target.name == "__init__"}
    assert classes == enums | constructed | set(PARTS) | NOT_MADE
