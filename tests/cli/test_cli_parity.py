"""``ddpx parity``: verdicts on trainings that agree, that differ, and that cannot be compared."""

import json
import re

import pytest
from cli_process import SCRIPTS, assert_code, run

from ddpx.cli.group import run_command_line
from ddpx.cli.parity import command
from ddpx.cli.parity.training import Training

pytestmark = pytest.mark.timeout(400)  # up to four launches; a rank takes seconds to import torch


def test_same_training_is_identical():
    """A training with accumulation, which is longer than the compared steps."""
    done = run("parity", "train.py", "--steps", 3, "--accumulate", "--num-steps", 5)
    assert_code(done, 0)
    # 2 ranks with 6 params and 3 buffers of BatchNorm; also weights at the start, and 2 losses per
    # step.
    assert "36 gradients, 12 losses, 72 weights compared, bit for bit, on 2 ranks." in done.stdout
    assert done.stdout.endswith("Identical.\n")
    rows = re.findall(r"^(\d) +(\S+) +(\S+) +identical +identical +identical", done.stdout, re.M)
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert all(ddp == ours for _, ddp, ours in rows)
    for cost in ("median step, ms", "peak memory, MiB"):
        for rank in range(2):
            found = re.search(rf"rank {rank}: {cost} +([\d.]+) +([\d.]+) +([\d.]+)", done.stdout)
            assert found and float(found[1]) > 0 and float(found[2]) > 0, done.stdout


@pytest.mark.full_only
def test_first_difference_is_named():
    """One element of one gradient of one rank differs. All later differences follow from it."""
    done = run("parity", "train.py", "--spoil", 3)
    assert_code(done, 1)
    last = done.stdout.splitlines()[-1]
    assert last == (
        "Different: step 3, rank 1: the gradient of 2.weight differs in 1 of 24 elements, "
        "largest difference 0.5."
    )
    assert re.search(r"^2 .* identical +identical +identical", done.stdout, re.M)
    assert re.search(r"^3 .* identical +1 differs +1 differs", done.stdout, re.M)


@pytest.mark.full_only
def test_unseeded_script_is_told_from_a_difference():
    done = run("parity", "train.py", "--unseeded", "--num-steps", 2)
    assert_code(done, 1)
    assert (
        "Different: before step 1, rank 0: the weight 0.weight. Two runs with DDP differ"
        in done.stdout
    )
    assert "Seed all random numbers of the script" in done.stdout


def test_build_function_over_shared_memory():
    options = ("--set", "gradient_as_bucket_view=true", "--set", "bucket_cap_mb=0.5")
    done = run("parity", "models_to_build:mlp", "--backend", "shm", "--steps", 4, *options)
    assert_code(done, 0)
    assert "48 gradients, 8 losses, 60 weights compared, bit for bit, on 2 ranks." in done.stdout


@pytest.mark.parametrize(
    ("words", "num_steps", "backend", "arguments"),
    [
        ((), 10, "gloo", {}),
        (("--steps", "4", "--backend", "shm"), 4, "shm", {}),
        (
            ("--set", "bucket_cap_mb=0.5", "--set", "static_graph=TRUE", "--set", "dim=None"),
            *(10, "gloo", {"bucket_cap_mb": 0.5, "static_graph": True, "dim": None}),
        ),
    ],
)
def test_options_of_a_function_reach_the_training(
    monkeypatch, words, num_steps, backend, arguments
):
    subjects = []
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(command, "_compare", lambda subject: subjects.append(subject) or 0)
    assert run_command_line(["parity", "models_to_build:mlp", *words]) == 0
    (subject,) = subjects
    training = Training(**json.loads(subject.script.arguments[0]))
    assert training == Training("models_to_build:mlp", num_steps, backend, arguments)
    assert (subject.num_ranks, subject.title) == (2, "ReducerDDP")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("wraps_nothing.py", "wrapped no model in DistributedDataParallel"),
        pytest.param(*("uses_reducer.py", "uses ReducerDDP directly"), marks=pytest.mark.full_only),
    ],
)
def test_script_without_ddp_cannot_be_compared(script, reason):
    done = run("parity", "--nproc-per-node", 1, script)
    assert_code(done, 2)
    assert reason in done.stderr


def test_a_rank_without_a_record_is_told(tmp_path):
    (tmp_path / "leaves.py").write_text("import os; os._exit(0)")
    done = run("parity", "--nproc-per-node", 1, "leaves.py", cwd=tmp_path)
    assert_code(done, 2)
    assert "leaves.py left no recording" in done.stderr and "os._exit()" in done.stderr


@pytest.mark.full_only
def test_failed_script_is_no_verdict():
    done = run("parity", "fails.py")
    assert_code(done, 1)
    assert "fails.py failed with DDP. Nothing was compared." in done.stderr


@pytest.mark.parametrize(
    ("wrapper", "code", "last"),
    [
        pytest.param("Derived", 0, "Identical.", marks=pytest.mark.full_only),
        ("Sums", 1, "Different: step 1, rank 0: the gradient of 0.weight differs in 48 of 48"),
    ],
)
def test_another_class_is_compared_with_ddp(wrapper, code, last):
    """One class derives from DDP, and one does not."""
    done = run("parity", "--class", f"wrappers:{wrapper}", "train.py", "--num-steps", 2)
    assert_code(done, code)
    assert f"loss, {wrapper}" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(last)


def test_what_is_no_wrapper_is_not_compared():
    done = run("parity", "--class", "wrappers:_sum", "train.py")
    assert_code(done, 2)
    assert "--class wrappers:_sum does not name a wrapper class" in done.stderr


_NO_BACKWARD = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
torch.autograd.grad(model(torch.ones(2, 4)).sum(), model.parameters())
dist.destroy_process_group()
"""


def test_a_script_without_a_backward_is_no_verdict(tmp_path):
    (tmp_path / "no backward.py").write_text(_NO_BACKWARD)
    done = run("parity", "no backward.py", cwd=tmp_path)
    assert_code(done, 2)
    assert "no backward.py averaged no gradients" in done.stderr
    assert "Identical" not in done.stdout
