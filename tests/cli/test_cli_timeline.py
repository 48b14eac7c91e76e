"""``ddpx timeline``: records a script, shows recordings, and compares them."""

import re
from dataclasses import replace

import pytest
from cli_process import assert_code, run

from ddpx.cli.timeline.compare import comparison_text
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


def test_all_forms_are_written(recorded):
    out, said = recorded
    assert sorted(path.name for path in out.iterdir()) == _FORMS
    assert all(path.stat().st_size for path in out.iterdir())
    assert (out / "summary.txt").read_text().strip() in said
    timeline = Timeline.load(out / "trace.json")
    assert [step.number for step in timeline.steps] == [0, 1, 2, 3, 4]
    assert all(sorted(step.ranks) == [0, 1] for step in timeline.steps)


def test_show_prints_the_same_again(recorded):
    out, _ = recorded
    done = run("timeline", "show", out / "trace.json")
    assert_code(done, 0)
    assert done.stdout == (out / "summary.txt").read_text()


def test_recording_against_itself(recorded):
    trace = recorded[0] / "trace.json"
    done = run("timeline", "show", trace, "--against", trace)
    assert_code(done, 0)
    ratios = re.findall(r"\((\d+\.\d+)\)", done.stdout)
    assert len(ratios) > 5 and set(ratios) == {"1.00"}
    assert "Steps take as long as in" in done.stdout


def test_slower_recording_is_said_to_be(recorded):
    base = Timeline.load(recorded[0] / "trace.json").summary()
    base = replace(base, ranks=tuple(replace(rank, step_error_ms=0.0) for rank in base.ranks))
    # Adds the same time on each rank, so that the slowest rank stays the slowest.
    more_ms = max(rank.step_ms for rank in base.ranks)
    slow = replace(
        base,
        ranks=tuple(
            replace(rank, step_ms=rank.step_ms + more_ms, exposed_ms=rank.exposed_ms + more_ms)
            for rank in base.ranks
        ),
        buckets=(replace(base.buckets[0], num_params=1), *base.buckets[1:]),
    )
    text = comparison_text(slow, base, "after", "before")
    assert "Steps of after are slower, 2.00 times" in text
    assert f"Most of the difference is exposed communication, {more_ms:+.2f} ms" in text
    assert text.endswith("The buckets of the recordings differ.")


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
