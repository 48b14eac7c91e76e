"""What `make foreign-test` makes of the output of suites: outcomes, verdicts and tables."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "scripts")]

from foreign import environments, page, processes, pytest_runs, script_runs  # noqa: E402
from foreign.environments import Environment  # noqa: E402
from foreign.reasons import REASONS  # noqa: E402
from foreign.suite import compare  # noqa: E402
from foreign.suites import SUITES  # noqa: E402
from outcomes import Outcome  # noqa: E402

# ---- pytest --------------------------------------------------------------------------------------

TESTS = """
import os, pytest, torch

def test_passes():
    torch.DistributedDataParallel()

def test_fails():
    assert 1 + 1 == 3

@pytest.mark.skip(reason="no GPU")
def test_is_skipped():
    pass

def test_ends_the_process():
    os._exit(7)

def test_after_it():
    pass
"""

# In the place of torch: the plugin counts constructions that foreign_start logs.
TORCH = """
import os

class DistributedDataParallel:
    def __init__(self):
        with open(os.environ["FOREIGN_LOG"], "a") as log:
            log.write("ddpx\\n")
"""


@pytest.fixture
def environment(tmp_path: Path):
    """The interpreter of this process, with the plugin on its path."""
    return Environment(Path(sys.executable), tmp_path)


def test_outcomes_of_a_file_in_which_a_test_ends_the_process(environment, tmp_path):
    (tmp_path / "some_test.py").write_text(TESTS)
    (tmp_path / "torch.py").write_text(TORCH)
    inside = ROOT / "scripts" / "foreign" / "inside"
    found = pytest_runs.run(
        environment,
        "ddpx",
        tmp_path,
        ["some_test.py"],
        limit_s=60,
        extra={"PYTHONPATH": f"{inside}:{tmp_path}"},
    )
    assert {name: (each.status, each.built) for name, each in found.items()} == {
        "some_test::test_passes": ("pass", 1),
        "some_test::test_fails": ("fail", 0),
        "some_test::test_is_skipped": ("skip", 0),
        "some_test::test_ends_the_process": ("crash", 0),
        "some_test::test_after_it": ("pass", 0),
    }
    assert found["some_test::test_fails"].reason == "assert (1 + 1) == 3"
    assert found["some_test::test_is_skipped"].reason == "no GPU"
    assert found["some_test::test_ends_the_process"].reason == "the process ended with 7"


def test_a_file_that_cannot_be_imported_fails(environment, tmp_path):
    (tmp_path / "some_test.py").write_text("import no_such_module\n")
    inside = ROOT / "scripts" / "foreign" / "inside"
    extra = {"PYTHONPATH": str(inside)}
    found = pytest_runs.run(environment, "torch", tmp_path, ["some_test.py"], 60, extra)
    assert found["some_test.py"].status == "fail"
    assert found["some_test.py"].reason == "cannot be imported"


def test_the_test_that_runs_is_the_last_one_without_an_outcome():
    assert pytest_runs.unfinished([]) is None
    assert pytest_runs.unfinished([{"started": "a"}]) == "a"
    assert pytest_runs.unfinished([{"started": "a"}, {"test": "a"}]) is None
    assert pytest_runs.unfinished([{"started": "a"}, {"test": "a"}, {"started": "b"}]) == "b"


def test_the_error_of_a_child_process_is_the_reason():
    reason = (
        "RuntimeError: Process 0 exited with error code 10 and exception:\nTraceback:\n"
        "  File x\nAssertionError: Param is not in the context\n"
    )
    line = {"test": "x.py::a", "status": "fail", "reason": reason}
    (outcome,) = pytest_runs.outcomes([line]).values()
    assert outcome.reason == "AssertionError: Param is not in the context"


# ---- scripts -------------------------------------------------------------------------------------


def test_outcomes_of_scripts():
    assert script_runs.judge(0, "text\nweights: ab12\n", 9).weights == "ab12"
    assert script_runs.judge(None, "", 9).status == "timeout"
    failed = script_runs.judge(1, "[rank1]: ValueError: no\nsome.ChildFailedError: \n", 9)
    assert (failed.status, failed.reason) == ("fail", "ValueError: no")
    assert script_runs.judge(-6, "nothing", 9).reason == "exit code -6"


def test_a_command_ends_with_its_children(tmp_path):
    code = "import subprocess;print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid)"
    log, env = tmp_path / "log", {"FOREIGN_LOG": str(tmp_path / "built")}
    assert processes.run([sys.executable, "-c", code], env, log, tmp_path, 30) == 0
    pid = int(log.read_text())
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}/stat").exists()
    assert processes.run(["sleep", "60"], env, log, tmp_path, 0.2) is None


# ---- environments --------------------------------------------------------------------------------


def test_the_reason_of_pip():
    text = (
        "Collecting x\n\nThe conflict is caused by:\n    x 2.0 depends on torch<2.7\n"
        "    The user requested (constraint) torch==2.13.0\n\nTo fix this you could try\n"
        "ERROR: ResolutionImpossible: for help visit\n"
    )
    expected = "x 2.0 depends on torch<2.7; The user requested (constraint) torch==2.13.0"
    assert environments.reason_in(text) == expected
    assert environments.reason_in("Collecting\nERROR: No matching\nERROR: no\n") == "No matching"


# ---- verdicts and tables -------------------------------------------------------------------------


def test_other_weights_are_a_failure():
    torch = {"a": Outcome("pass", built=1, weights="1"), "b": Outcome("pass", built=1, weights="1")}
    ddpx = {"a": Outcome("pass", built=1, weights="1"), "b": Outcome("pass", built=1, weights="2")}
    assert [line.verdict for line in compare(torch, ddpx, {})] == ["ok", "WORSE"]


def test_a_test_that_ran_with_one_class_only_is_a_failure():
    (line,) = compare({"a": Outcome("pass")}, {}, {})
    assert line.verdict == "WORSE"
    (line,) = compare({}, {"a": Outcome("fail")}, {})
    assert line.verdict == "neither"


def test_table():
    torch = {
        "x::a": Outcome("pass", built=1),
        "x::b": Outcome("pass"),
        "x::c": Outcome("skip", "no GPU"),
        "y": Outcome("pass", built=1),
    }
    ddpx = {
        "x::a": Outcome("pass", built=1),
        "x::b": Outcome("fail", "ValueError: a | b"),
        "x::c": Outcome("skip", "no GPU"),
        "y": Outcome("timeout", "over 9 s", built=1),
    }
    reasons = {"x::b": "helps"}
    assert page.table(compare(torch, ddpx, reasons), reasons).splitlines()[2:] == [
        "| `x` | 1 | 2 passed, 1 skipped | 1 passed, 1 failed, 1 skipped | |",
        "| `x::b` | | passed | failed: `ValueError: a \\| b` | helps |",
        "| `y` | | passed | late | **unexplained** |",
    ]


def test_each_suite_has_its_place_in_the_page():
    text = (ROOT / "docs" / "compatibility.md").read_text()
    for name in SUITES:
        assert f"<!-- foreign {name}: begin -->" in text, name
    assert page.NO_REASON not in text, "a difference has no reason in scripts/foreign/reasons.py"


def test_reasons_are_those_of_suites():
    assert set(REASONS) <= set(SUITES)
    assert all(reason for reasons in REASONS.values() for reason in reasons.values())
