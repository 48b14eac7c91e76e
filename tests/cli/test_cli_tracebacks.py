"""Tracebacks begin with the user's script. Exceptions and hooks are those of the script."""

from __future__ import annotations

import json
import re

import pytest
from cli_process import SCRIPTS, run

_RAISES = SCRIPTS / "raises.py"
_ONE = "--nproc-per-node=1"  # ranks would mix the lines of their tracebacks


def _first_files(stderr: str) -> list[str]:
    """The file of the first frame of each traceback."""
    return re.findall(r'Traceback \(most recent call last\):\n +File "([^"]+)"', stderr)


_OTHERS = ("parity", "plan", "timeline")


@pytest.mark.parametrize(
    "command", ["run", *(pytest.param(name, marks=pytest.mark.full_only) for name in _OTHERS)]
)
def test_traceback_begins_with_the_script(command, tmp_path):
    done = run(command, _ONE, _RAISES, "plainly", cwd=tmp_path)
    assert done.returncode == 1
    assert _first_files(done.stderr) == [str(_RAISES)]
    assert "LearningError: the loss is 42" in done.stderr
    assert "runpy" not in done.stderr and "ddpx/cli" not in done.stderr


def test_traceback_of_a_module_and_of_a_chain():
    done = run("run", _ONE, "-m", "raises", "chained")
    assert _first_files(done.stderr) == [str(_RAISES)] * 2
    assert "runpy" not in done.stderr


@pytest.mark.full_only
def test_survivor_has_the_same_traceback():
    done = run("run", _ONE, "--keep-survivors", "raises.py", "plainly")
    assert done.returncode == 1
    assert "runpy" not in done.stderr and "ddpx/cli" not in done.stderr
    assert "ddpx: rank 0 ended with exit code 1" in done.stderr


@pytest.mark.full_only
def test_syntax_error_has_no_frame(tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text("print('begins'\n")
    done = run("run", _ONE, script)
    assert done.returncode == 1
    assert _first_files(done.stderr) == []
    assert f'File "{script}", line 1' in done.stderr and "SyntaxError" in done.stderr


def test_hook_of_the_script_gets_what_it_would_get_from_python():
    done = run("run", _ONE, _RAISES, "its own hook")
    assert done.returncode == 1
    told = f"hook of the script: LearningError, the loss is 42, same True, from {_RAISES}"
    assert told in done.stdout
    assert "Traceback" not in done.stderr


def test_error_file_of_torchelastic(tmp_path):
    done = run("run", _ONE, "--log-dir", tmp_path, _RAISES, "recorded")
    assert done.returncode == 1
    (file,) = tmp_path.rglob("error.json")
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "LearningError: the loss is 42"
    stack = message["extraInfo"]["py_callstack"]
    assert str(_RAISES) in stack and "runpy" not in stack


def test_stack_of_a_peer_begins_with_the_script():
    done = run("run", "--nproc-per-node=2", "shows_stack.py", cwd=SCRIPTS)
    assert done.returncode == 0, done.stderr
    first = re.search(r'thread MainThread:\n +File "([^"]+)"', done.stdout)
    assert first and first[1].endswith("shows_stack.py"), done.stdout
