"""``ddpx timeline``: records a script, shows recordings, and compares them."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from cli_process import assert_code, environment, run, start

from ddpx.cli.group import run_command_line
from ddpx.timeline import Timeline

pytestmark = pytest.mark.timeout(200)

_FORMS = ["summary.txt", "timeline.html", "timeline.png", "trace.json"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A folder with all output forms, and the printed text.

    Of 9 steps of a script, 5 are recorded.
    """
    out = tmp_path_factory.mktemp("recorded") / "out"
    words = ("timeline", "train.py", "--num-steps", 9, "--steps", 5, "--out", out)
    done = run(*words)
    assert_code(done, 0)
    return out, done.stdout


def _show(capsys, *words, code=0):
    """The output of ``ddpx timeline show``."""
    assert run_command_line(["timeline", "show", *map(str, words)]) == code
    return capsys.readouterr().out


def test_all_forms_are_written(recorded):
    out, said = recorded
    assert sorted(path.name for path in out.iterdir()) == _FORMS
    assert all(path.stat().st_size for path in out.iterdir())
    assert (out / "summary.txt").read_text().strip() in said
    timeline = Timeline.load(out / "trace.json")
    assert [step.number for step in timeline.steps] == [0, 1, 2, 3, 4]
    assert all(sorted(step.ranks) == [0, 1] for step in timeline.steps)


@pytest.mark.parametrize("name", ["trace.json", "."])
def test_show_prints_the_same_again(recorded, name, capsys):
    out, _ = recorded
    assert _show(capsys, out / name) == (out / "summary.txt").read_text()


def test_recording_against_itself(recorded, capsys):
    trace = recorded[0] / "trace.json"
    said = _show(capsys, trace, "--against", trace, code=2)
    ratios = re.findall(r"\((\d+\.\d+)\)", said)
    assert len(ratios) > 5 and set(ratios) == {"1.00"}
    assert "Too few steps for a verdict" in said


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_in_an_encoding_without_all_characters(encoding, recorded):
    words = ["timeline", "show", recorded[0], "--against", recorded[0]]
    for command, code in ((words, 2), (words[:3], 0)):  # too few steps for a verdict
        done = subprocess.run(
            [sys.executable, "-m", "ddpx", *command],
            env={**environment(), "PYTHONIOENCODING": encoding},
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code and not done.stderr, done.stderr.decode()


def test_files_are_written_where_the_locale_has_no_encoding(recorded, tmp_path):
    code = (
        "import sys; from pathlib import Path; from ddpx.cli.timeline.launches import load, write; "
        "write(load(Path(sys.argv[1]), 0), '\\xb1', Path(sys.argv[2]))"
    )
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run(
        [sys.executable, "-c", code, recorded[0], tmp_path],
        env={**environment(), **variables},
        timeout=60,
        check=True,
    )
    assert (tmp_path / "summary.txt").read_text(encoding="utf-8") == "\xb1\n"


@pytest.mark.full_only
def test_launches(tmp_path, capsys):
    out = tmp_path / "out"
    words = ("timeline", "--launches", 2, "--steps", 3, "--nproc-per-node", 1, "train.py")
    done = run(*words, "--out", out)
    assert_code(done, 0)
    assert sorted(path.name for path in out.iterdir()) == sorted([*_FORMS, "trace-2.json"])
    both, shown = re.search(
        r"2 launches\. Median steps, on the slowest rank: (.*) ms\.\n"
        r"The tables show the launch of (.*) ms\.",
        done.stdout,
    ).groups()
    assert both.split(", ")[0] == shown  # the faster one
    assert _show(capsys, out) == (out / "summary.txt").read_text()


def test_script_that_uses_reducer_by_itself(tmp_path):
    out = tmp_path / "out"
    words = ("timeline", "--nproc-per-node", 1, "uses_reducer.py", "--out", out)
    done = run(*words)
    assert_code(done, 0)
    assert sorted(path.name for path in out.iterdir()) == _FORMS


def test_script_that_wraps_nothing(tmp_path):
    words = ("timeline", "wraps_nothing.py", "--nproc-per-node", 1, "--out", tmp_path / "out")
    done = run(*words)
    assert_code(done, 2)
    assert "wraps_nothing.py wrapped no model in DistributedDataParallel" in done.stderr
    assert not (tmp_path / "out").exists()
    assert "wraps_nothing.py left no recording" in done.stderr and "os._exit()" in done.stderr


_TRAINING = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
models = [DistributedDataParallel(torch.nn.Linear(4, 4)) for _ in range(2)]
for step in range(4):
    if step == {fails_at} and dist.get_rank() == 1:
        raise ValueError("the loss is 42")
    for model in models:
        model(torch.randn(2, 4)).sum().backward()
"""


def test_recording_of_a_script_that_fails_is_kept(tmp_path):
    (tmp_path / "fails late.py").write_text(_TRAINING.format(fails_at=3))
    done = run("timeline", "fails late.py", "--out", "out", cwd=tmp_path)
    assert done.returncode == 1 and "the loss is 42" in done.stderr, done.stderr
    assert "Files written to out: trace.json, timeline.png, timeline.html, summary" in done.stdout
    assert "The script wrapped 2 models. This is the first model." in done.stdout
    assert "The script failed. These files have the steps before the failure." in done.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == _FORMS
    steps = Timeline.load(tmp_path / "out").steps
    assert [step.number for step in steps] == [0, 1, 2]


def test_recording_of_an_interrupted_script_is_kept(tmp_path):
    process = start("timeline", "--steps", 5, "--out", tmp_path / "out", "trains_on.py")
    try:
        for _ in range(2):
            assert process.stdout.readline().startswith("training in ")
        time.sleep(1)
        os.killpg(process.pid, signal.SIGINT)
        said, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in told, told
    assert "The script was interrupted. These files have the steps before the interrupt." in said
    assert Timeline.load(tmp_path / "out").steps


@pytest.mark.full_only
def test_script_that_fails_in_its_first_step_has_no_recording(tmp_path):
    (tmp_path / "fails.py").write_text(_TRAINING.format(fails_at=0))
    done = run("timeline", "fails.py", "--out", "out", cwd=tmp_path)
    assert done.returncode == 1 and "the loss is 42" in done.stderr, done.stderr
    assert "the script failed, and its recording is not kept: " in done.stderr
    assert not (tmp_path / "out").exists()
