"""Runs scripts of several ranks in the environment of a suite."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from outcomes import Outcome

from foreign import processes
from foreign.environments import Environment

_WEIGHTS = re.compile(r"^weights: (\w+)$", re.MULTILINE)
_MOST_CHARACTERS = 6000


def run(
    environment: Environment,
    contestant: str,
    words: Sequence[str],
    limit_s: float,
    ranks: int = 2,
    extra: Mapping[str, str] | None = None,
) -> Outcome:
    """Runs a script under torchrun, in an empty folder.

    If the script fails with torch's class, it runs once more: a pass is needed for a comparison.

    Args:
        environment: The environment.
        contestant: The class, "torch" or "ddpx".
        words: The script and its arguments, as for torchrun.
        limit_s: The time limit, in s.
        ranks: The number of ranks. 0: without torchrun.
        extra: Further environment variables.
    """
    outcome = _run(environment, contestant, words, limit_s, ranks, extra or {})
    if contestant == "torch" and outcome.status != "pass":
        outcome = _run(environment, contestant, words, limit_s, ranks, extra or {})
    name = words[0].rpartition("/")[2]
    print(f"  {contestant:5} {name}: {outcome.status} ({outcome.seconds} s)", flush=True)
    return outcome


def _run(
    environment: Environment,
    contestant: str,
    words: Sequence[str],
    limit_s: float,
    ranks: int,
    extra: Mapping[str, str],
) -> Outcome:
    start = time.monotonic()
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [str(environment.python), *(launcher if ranks else []), *words]
    with tempfile.TemporaryDirectory(prefix="foreign-", ignore_cleanup_errors=True) as folder:
        log, built = Path(folder, "log"), Path(folder, "built")
        (elsewhere := Path(folder, "elsewhere")).mkdir()
        env = processes.variables(contestant, built, extra)
        code = processes.run(command, env, log, elsewhere, limit_s)
        text = log.read_text(errors="replace")
        outcome = judge(code, text, limit_s)
        outcome.built = processes.num_built(built, contestant)
        if contestant == "ddpx" and processes.num_built(built, "torch"):
            outcome.status, outcome.reason = "fail", "torch's class was constructed"
    outcome.seconds = round(time.monotonic() - start, 1)
    return outcome


def judge(code: int | None, text: str, limit_s: float) -> Outcome:
    """The outcome of a run from its exit code and its output. The code is None after the limit."""
    details = "" if code == 0 else text[-_MOST_CHARACTERS:]
    if code is None:
        return Outcome("timeout", f"over {limit_s:.0f} s", details=details)
    if code:
        reason = processes.error_in(text) or f"exit code {code}"
        return Outcome("fail", reason, details=details)
    return Outcome("pass", weights="".join(_WEIGHTS.findall(text)))
