"""``ddpx plan``, and ``ddpx run --bucket-cap-mb``: the search for an unchanged script."""

import json
import re

import pytest
from cli_process import assert_code, run

import ddpx
from ddpx.cli.plan.command import _check_plot, _text
from ddpx.ddp.arguments.bucket_sizes import caps_in_bytes
from ddpx.planning import MeasuredPlan, PlanReport
from ddpx.planning.candidates import ReadyGradient
from ddpx.planning.gain import Gain
from ddpx.timeline.export import plan_picture


@pytest.mark.timeout(200)
def test_plan_is_written_and_ends_the_script(tmp_path):
    """The folders of the plan and of the picture do not exist before."""
    out, plot = tmp_path / "plans" / "plan.json", tmp_path / "pictures" / "plan.svg"
    done = run("plan", "--out", out, "--plot", plot, "trains_long.py", "1000")
    assert_code(done, 0)
    assert "by itself" not in done.stdout
    plan = ddpx.BucketPlan.load(out)
    assert sum(map(len, plan.buckets)) == 24
    assert "bucket_cap_mb_list=[" in done.stdout and f"Plan written to {out}" in done.stdout
    assert "after " in done.stdout and " steps: " in done.stdout
    assert plot.read_text().startswith("<?xml")


@pytest.mark.full_only
@pytest.mark.timeout(200)
def test_a_short_script_ends_without_a_plan(tmp_path):
    done = run("plan", "--out", tmp_path / "plan.json", "trains_long.py", "20")
    assert_code(done, 2)
    assert "by itself" in done.stdout
    assert "ended before the plan was known" in done.stderr
    assert not (tmp_path / "plan.json").exists()


_WITH_HOOK = """
import torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
model.register_comm_hook(None, fp16_compress_hook)
"""


_NO_PLAN = "of a model with several gradients and no communication hook"


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [("", 2, _NO_PLAN), ("raise SystemExit(3)", 1, "failed with exit code 3")],
)
def test_a_communication_hook_leaves_nothing_to_plan(tmp_path, monkeypatch, ending, code, said):
    """A plan of the environment does not count. A script that fails keeps its own error."""
    monkeypatch.setenv("DDPX_BUCKET_PLAN", "no.json")
    (tmp_path / "with hook.py").write_text(_WITH_HOOK + ending)
    done = run("plan", "--out", "a plan.json", "with hook.py", cwd=tmp_path)
    assert_code(done, code)
    assert said in done.stderr and (_NO_PLAN in done.stderr) == (code == 2)
    assert not (tmp_path / "a plan.json").exists()


@pytest.mark.full_only
@pytest.mark.timeout(200)
def test_the_plan_of_the_group_of_rank_0(tmp_path):
    """The second group communicates with the first group in each step."""
    out = tmp_path / "plan.json"
    done = run("plan", "--out", out, "--nproc-per-node=4", "trains_in_groups.py", "1000")
    assert_code(done, 0)
    assert sum(map(len, ddpx.BucketPlan.load(out).buckets)) == 24
    assert "by itself" not in done.stdout and "Traceback" not in done.stderr


def test_run_passes_the_size_on():
    done = run("run", "--nproc-per-node=1", "--bucket-cap-mb", "auto", "tells_plan.py")
    assert_code(done, 0)
    assert "auto_buckets: environment, cap: 26214400" in done.stdout


GRADIENTS = tuple(ReadyGradient(1000, ready_s=0.001 * (index + 1)) for index in range(4))
COSTS = ((100.0, 0.001), (10_000.0, 0.003))


def test_the_text_has_times_in_ms_and_exact_sizes():
    """DDP puts one more gradient into a bucket that is a byte smaller than its size."""
    plans = (
        MeasuredPlan("default", ((0, 1, 2, 3),), 0.005, 0.006, 0.02),
        MeasuredPlan("best", ((0, 1), (2, 3)), 0.004, None, 0.01),
    )
    report = PlanReport("done", 9, "best", "it saves time", None, plans, GRADIENTS, COSTS)
    sizes = (102_400_004, 1_234_567)
    text = _text(report, ddpx.BucketPlan((("a",), ("b",)), sizes))
    rows = [re.split(" {2,}", line) for line in text.splitlines() if line[:4] in ("defa", "best")]
    assert rows == [["default", "1", "5.00", "6.00", "20.00"], ["best", "2", "4.00", "10.00"]]
    caps = json.loads(text.rpartition("bucket_cap_mb_list=")[2])
    assert caps_in_bytes(None, caps)[2] == sizes


@pytest.mark.parametrize("suffix", ["png", "svg", "html", "HTML"])
def test_the_picture_has_both_plans(tmp_path, suffix):
    plans = (
        MeasuredPlan("default", ((0, 1, 2, 3),), 0.005, 0.006, 0.02),
        MeasuredPlan("best", ((0, 1), (2, 3)), 0.004, None, 0.01),
    )
    report = PlanReport(
        "done", 9, "best", "it saves <time>", Gain(0.02, 0.01, 0.001), plans, GRADIENTS, COSTS
    )
    path = tmp_path / f"plan.{suffix}"
    _check_plot(path)
    plan_picture.draw(report, path)
    assert path.stat().st_size > 1000
    default, best = rows = plan_picture.make_figure(report).axes
    titles = [axes.get_title(loc="left") for axes in rows]
    assert titles == ["default: 1 bucket, step 20.0 ms", "best: 2 buckets, step 10.0 ms"]
    for axes, ends in ((default, {"predicted": 5, "measured": 6}), (best, {"predicted": 4})):
        legend = [text.get_text() for text in axes.get_legend().get_texts()]
        assert legend == [f"{name} {end}.0 ms" for name, end in ends.items()]
        assert [line.get_xdata()[0] for line in axes.get_lines()] == list(ends.values())
    if suffix.lower() == "html":
        assert "<time>" not in path.read_text() and "<svg" in path.read_text()


def test_a_long_title_is_within_the_picture():
    cause = (
        "the gain of the plan 'best, merged in pairs' is 4.1 ± 6.3 % of a step, which is not sure"
    )
    report = PlanReport("done", 254, "default", cause, None, (), GRADIENTS, COSTS)
    figure = plan_picture.make_figure(report)
    figure.draw_without_rendering()
    (shown,) = figure.texts
    assert shown.get_window_extent().x1 <= figure.bbox.x1


def test_a_report_without_plans_can_be_drawn(tmp_path):
    report = PlanReport("done", 0, "default", "the model has one gradient")
    plan_picture.draw(report, tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").exists()
