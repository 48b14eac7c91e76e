"""A rank of ``ddpx plan``: a rank of ``ddpx run`` that ends with the search of rank 0."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ddpx.cli import runner
from ddpx.comm.process_group import rank_of_job, ranks_of_job
from ddpx.ddp.search import wrapper_search
from ddpx.ddp.search.wrapper_search import Searched
from ddpx.planning import plan_of

PLAN, REPORT = "plan.json", "report.json"
# Rank 0 may reach the forward at which it writes later than its peers, as after an evaluation.
_TO_WRITE_S = 60.0
_AFTER_ERROR_S = 2.0
_POLL_S = 0.05


def main(words: Sequence[str]) -> None:
    """Runs the script until the first search on rank 0 has ended.

    Rank 0 then writes the results into a folder, the first word, and leaves the script with its
    process group. A rank of another group may get an error, since it loses these ranks.
    """
    plan = Path(words[0], PLAN)
    wrapper_search.call_at_end(functools.partial(_leave, plan))
    try:
        runner.main(words[1:])
    except Exception:
        if not _await_plan(plan, _AFTER_ERROR_S):
            raise
        sys.exit(0)


def _leave(plan: Path, replica: Searched) -> None:
    """Ends the script on all ranks of the group of rank 0, at the same forward."""
    assert replica.plan_report is not None
    ranks = ranks_of_job(replica.group)
    if ranks and 0 not in ranks:
        replica.module.register_forward_pre_hook(functools.partial(_leave_if_written, plan))
        return
    if rank_of_job(replica.group) == 0:
        plan.with_name(REPORT).write_text(json.dumps(replica.plan_report.to_json()))
        unfinished = plan.with_suffix(".part")
        plan_of(replica.reducer.plan.buckets, replica.managed).save(unfinished)
        unfinished.rename(plan)
    _await_plan(plan, _TO_WRITE_S)
    sys.exit(0)


def _leave_if_written(plan: Path, *_: object) -> None:
    if plan.exists():
        sys.exit(0)


def _await_plan(plan: Path, timeout_s: float) -> bool:
    """Waits until the plan exists. Returns False after ``timeout_s`` seconds."""
    deadline_s = time.monotonic() + timeout_s
    while not plan.exists() and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    return plan.exists()
