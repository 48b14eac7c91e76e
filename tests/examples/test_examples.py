"""Runs every example on two ranks, and checks the line with its result."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from forked_scripts import run_python

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TIME_LIMIT = 100.0  # seconds; a run takes about 5 on two idle cores, so a run of this length hangs
pytestmark = pytest.mark.timeout(3 * TIME_LIMIT)  # some tests have two runs
SPAWN = (sys.executable,)
TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node=2",
)
LAUNCH = (sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node=2")


def make_environment(visible_gpus: str | None) -> dict[str, str]:
    """Return an environment without the variables of a launcher."""
    marks = re.compile(
        r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*)"
    )
    environment = {name: value for name, value in os.environ.items() if not marks.fullmatch(name)}
    environment["OMP_NUM_THREADS"] = "1"
    if visible_gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible_gpus
    return environment


def stop(process: subprocess.Popen[str]) -> str:
    """End a process with its children. Return the output so far."""
    # SIGTERM comes first: torchrun puts its workers into sessions of their own, so only torchrun
    # can end them.
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            return process.communicate(timeout=10)[0]
        except subprocess.TimeoutExpired:
            continue
    return "(no output: something still holds the pipe)"


@contextmanager
def started(
    launcher: tuple[str, ...], script: str, *args: str, folder: Path, gpus: str | None = ""
) -> Iterator[subprocess.Popen[str]]:
    """Start an example in a process group of its own. The end of the block ends the group."""
    process = subprocess.Popen(
        [*launcher, str(EXAMPLES / script), *args],
        cwd=folder,  # the example must not write into the source tree
        env=make_environment(gpus),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            stop(process)


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for an example, check that it succeeded, and return its output."""
    try:
        output = process.communicate(timeout=TIME_LIMIT)[0]
    except subprocess.TimeoutExpired:
        pytest.fail(f"still running after {TIME_LIMIT:.0f} s; it had printed:\n{stop(process)}")
    assert process.returncode == 0, f"exit status {process.returncode}; it printed:\n{output}"
    return output


def run(launcher: tuple[str, ...], script: str, *args: str, folder: Path) -> str:
    """Run an example on CPU ranks. Check that it succeeded, and return its output."""
    words = (*launcher[1:], str(EXAMPLES / script), *args)
    done = run_python(*words, cwd=folder, env=make_environment(""), limit_s=TIME_LIMIT)
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"exit status {done.returncode}; it printed:\n{output}"
    return output


def assert_printed(output: str, *patterns: str) -> None:
    """Check that each pattern matches the output."""
    for pattern in patterns:
        assert re.search(pattern, output), f"no match of {pattern!r} in:\n{output}"


@pytest.mark.parametrize(
    ("script", "patterns"),
    [
        ("basic_spawn.py", [r"OK: 2 ranks on cpu agree after 30 steps, loss"]),
        pytest.param(
            *("checkpoint.py", [r"OK: 2 ranks on cpu resumed .* agree with unbroken training"]),
            marks=pytest.mark.full_only,
        ),
        pytest.param(
            *("model_parallel.py", [r"both halves are on the cpu", r"OK: 2 ranks of a two-device"]),
            marks=pytest.mark.full_only,
        ),
        pytest.param(
            "zero_redundancy.py",
            [r"plain Adam: \d+ bytes", r"bytes on rank 1", r"OK: same weights .* 50% of its state"],
            marks=pytest.mark.full_only,
        ),
        pytest.param(
            *("without_wrapper.py", [r"OK: a plain module on cpu, averaged over all ranks"]),
            marks=pytest.mark.full_only,
        ),
        ("token_average.py", [r"OK: 2 ranks on cpu have the weights of one process after 10 step"]),
        pytest.param(
            "data_parallel_comparison.py",
            [r"DataParallel: .* runs on cpu", r"OK: same weights after 20 steps"],
            marks=pytest.mark.full_only,
        ),
        pytest.param(
            "several_device_ids.py",
            [r"ValueError: .*device_ids", r"OK: 2 processes agree, rank 0 with device_ids=None"],
            marks=pytest.mark.full_only,
        ),
    ],
)
def test_spawned(script: str, patterns: list[str], tmp_path: Path) -> None:
    """Scripts that start their own ranks succeed."""
    assert_printed(run(SPAWN, script, "--world-size=2", folder=tmp_path), *patterns)


def test_sampler_script_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    """The second run resumes where the first run stopped, and set_epoch reshuffles every epoch."""
    script, checkpoint = "torchrun_sampler.py", f"--checkpoint={tmp_path / 'line.pt'}"
    first = run(TORCHRUN, script, checkpoint, "--epochs=5", folder=tmp_path)
    assert_printed(first, r"epoch 0: ", r"epoch 4: ", r"OK: 2 ranks on cpu .* after 5 epochs")
    assert "resumed" not in first

    second = run(TORCHRUN, script, checkpoint, "--epochs=7", folder=tmp_path)
    assert_printed(second, r"resumed at epoch 5", r"OK: 2 ranks on cpu .* after 7 epochs")
    assert re.findall(r"^epoch (\d+)", first + second, re.MULTILINE) == list("0123456")
    orders = re.findall(r"began with points (.*)", first + second)
    assert len(set(orders)) == 7, f"the order repeats: {orders}"
    assert [path.name for path in tmp_path.iterdir()] == ["line.pt"]


def test_full_training_saves_a_plain_module(tmp_path: Path) -> None:
    """The script learns, explains the missing SyncBatchNorm, and saves names without prefix."""
    path = tmp_path / "model.pt"
    output = run(TORCHRUN, "full_training.py", f"--output={path}", "--epochs=2", folder=tmp_path)
    assert_printed(output, r"SyncBatchNorm left out", r"epoch 1: lr", r"OK: 2 ranks .* reproduced")
    state = torch.load(path, weights_only=True)
    assert state
    assert not any(name.startswith("module.") for name in state)


@pytest.mark.parametrize(
    ("option", "source"),
    [
        ((), "--local-rank"),
        pytest.param(("--use-env",), "LOCAL_RANK", marks=pytest.mark.full_only),
    ],
)
def test_legacy_launcher(option: tuple[str, ...], source: str, tmp_path: Path) -> None:
    """torch.distributed.launch works with the argument and with the environment variable."""
    # --standalone, as for torchrun, since the launcher's fixed default port may be in use.
    output = run((*LAUNCH, "--standalone", *option), "legacy_launch.py", folder=tmp_path)
    assert_printed(output, rf"OK: 2 ranks .* env://, local rank from {source}\)")


def test_char_gpt_learns_and_ranks_agree(tmp_path: Path) -> None:
    """A small run of the script of `make demo`."""
    output = run(TORCHRUN, "char_gpt/train.py", "--smoke", "--out", "out", folder=tmp_path)
    assert_printed(output, r"held-out loss \d", r"weights identical on all 2 ranks: sha256 \w{16}")
    assert (tmp_path / "out" / "loss.png").stat().st_size > 1000
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["held_out_loss"][-1] < metrics["held_out_loss"][0]


@pytest.mark.full_only
def test_legacy_file_rendezvous(tmp_path: Path) -> None:
    """Two processes without a launcher find each other through a file, with the older argument
    spelling."""
    script = "legacy_launch.py"
    meet = (f"--init-method=file://{tmp_path / 'meet'}", "--world-size=2")
    with (
        started(SPAWN, script, *meet, "--rank=0", "--local_rank=0", folder=tmp_path) as rank_0,
        started(SPAWN, script, *meet, "--rank=1", "--local_rank=1", folder=tmp_path) as rank_1,
    ):
        output = finish(rank_0)
        finish(rank_1)
    assert_printed(output, r"OK: 2 ranks .* file://, local rank from --local-rank\)")


@pytest.mark.parametrize(
    ("script", "argv", "message"),
    [
        ("basic_spawn", "--world-size=0", "expected a positive integer, got '0'"),
        ("checkpoint", "--steps=ten", "expected a positive integer, got 'ten'"),
        ("torchrun_sampler", "", "required: --checkpoint"),
        ("torchrun_sampler", "--checkpoint=missing/line.pt", "folder 'missing' does not exist"),
        ("full_training", "--output=model.pt --lr=-1", "--lr must be above 0"),
        ("legacy_launch", "", "no RANK in the environment"),
        ("legacy_launch", "--init-method=tcp://a:1", "--init-method must be env:// or file:///"),
        ("legacy_launch", "--init-method=file:///meet", "needs --rank and --world-size"),
        ("legacy_launch", "--init-method=file:///meet --rank=2 --world-size=2", "from 0 to 1"),
    ],
)
def test_bad_arguments_get_a_clear_error(
    script: str,
    argv: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An invalid command line ends the script before it creates a process group."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as exit_info:
        importlib.import_module(script).parse_args(argv.split())
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_torchrun_script_without_torchrun(tmp_path: Path) -> None:
    """A script for torchrun, started by plain python, explains how to start it."""
    args = (f"--checkpoint={tmp_path / 'line.pt'}",)
    with started(SPAWN, "torchrun_sampler.py", *args, folder=tmp_path) as process:
        output = process.communicate(timeout=TIME_LIMIT)[0]
    assert process.returncode != 0
    assert_printed(output, r"no LOCAL_RANK .*\n.*torchrun --standalone")


def test_cuda_graph_needs_cuda(tmp_path: Path) -> None:
    """Without a GPU, the script says so and fails."""
    with started(SPAWN, "cuda_graph.py", folder=tmp_path) as process:
        output = process.communicate(timeout=TIME_LIMIT)[0]
    assert process.returncode == 1
    assert_printed(output, r"error: CUDA graphs need a CUDA GPU")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize(
    ("launcher", "ranks"), [(SPAWN, "1 rank"), (TORCHRUN, "2 ranks")], ids=["1 rank", "2 ranks"]
)
def test_cuda_graph(launcher: tuple[str, ...], ranks: str, tmp_path: Path) -> None:
    """One rank, and two ranks that may share a GPU."""
    with started(launcher, "cuda_graph.py", folder=tmp_path, gpus=None) as process:
        assert_printed(finish(process), rf"OK: {ranks}, 20 replays equal 20 eager steps")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize(
    "script",
    [
        "basic_spawn.py",
        "checkpoint.py",
        "zero_redundancy.py",
        "token_average.py",
        "without_wrapper.py",
        "data_parallel_comparison.py",
    ],
)
def test_spawned_on_gpus(script: str, tmp_path: Path) -> None:
    """With GPUs, the same scripts run on NCCL with one rank per GPU."""
    ranks = f"--world-size={min(2, torch.cuda.device_count())}"
    with started(SPAWN, script, ranks, folder=tmp_path, gpus=None) as process:
        assert_printed(finish(process), r"OK: ")
