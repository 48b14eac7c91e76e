"""The example that survives the loss of ranks, started as a user starts it, with a real kill."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from forked_scripts import run_python

pytestmark = pytest.mark.timeout(300)  # each launch may take 100 s
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "elastic" / "train.py"
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
_OF_LAUNCHERS = re.compile(r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")


def run(*words: object, cwd: Path) -> str:
    """Runs the example, which must succeed. Returns its output."""
    kept = {name: value for name, value in os.environ.items() if not _OF_LAUNCHERS.fullmatch(name)}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH"))))
    kept["OMP_NUM_THREADS"] = "1"
    kept["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as in the example's README
    done = run_python("-m", *(str(word) for word in words), cwd=cwd, env=kept, limit_s=140)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


def losses(output: str) -> str:
    found = re.search(r"OK: 30 steps, (loss \S+), the same weights on", output)
    assert found, output
    return found[1]


def test_from_its_checkpoint_after_a_restart(tmp_path):
    """The result equals that of an undisturbed run."""
    arguments = ("--checkpoint", tmp_path / "elastic.pt")
    killed = run(*TORCHRUN, "--max-restarts=2", EXAMPLE, *arguments, "--kill", "1:12", cwd=tmp_path)
    assert killed.count("resumes at step 10") == 2
    # torchrun may reap the process first. Older kernels then do not tell other processes how it
    # ended.
    assert re.search(r"rank 1 \(host [^)]+\) (was killed by SIGKILL|died)", killed), killed
    assert losses(killed) == losses(run(*TORCHRUN, EXAMPLE, cwd=tmp_path))


@pytest.mark.parametrize("kill", ["0:12", pytest.param("1:0", marks=pytest.mark.full_only)])
def test_without_a_restart(tmp_path, kill):
    output = run(
        *("ddpx", "run", "--keep-survivors", "--nproc-per-node=3", EXAMPLE),
        *("--shrink", "--kill", kill),
        cwd=tmp_path,
    )
    rank, step = kill.split(":")
    assert output.count(f"of 2, without [{rank}]") == 2
    assert output.count(f"continues at step {step} as rank") == 2
    assert f"ddpx: rank {rank} was killed by SIGKILL; the other ranks continue" in output
    assert "the same weights on 2 ranks" in output
