"""A rank of ``ddpx plan``: a rank of ``ddpx run`` that ends with the search of rank 0."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from ddpx.cli import runner
from ddpx.comm.process_group import rank_of_job
from ddpx.ddp.search import wrapper_search
from ddpx.ddp.search.wrapper_search import Searched
from ddpx.planning import plan_of

PLAN, REPORT = "plan.json", "report.json"


def main(words: Sequence[str]) -> None:
    """Runs the script until the first search of rank 0 has ended.

    Rank 0 then writes the results into a folder, the first word, and leaves with its group. A rank
    of another group may then lose the ranks with which it communicates.
    """
    plan = Path(words[0], PLAN)
    wrapper_search.call_at_end(functools.partial(_leave, plan))
    try:
        runner.main(words[1:])
    except Exception:
        if not plan.exists():
            raise
        sys.exit(0)


def _leave(plan: Path, replica: Searched) -> None:
    """Ends the script on all ranks of the group of rank 0, at the same forward."""
    assert replica.plan_report is not None
    if 0 not in dist.get_process_group_ranks(replica.group):
        replica.module.register_forward_pre_hook(functools.partial(_follow, plan))
        return
    if rank_of_job(replica.group) == 0:
        plan.with_name(REPORT).write_text(json.dumps(replica.plan_report.to_json()))
        written = plan.with_suffix(".part")
        plan_of(replica.reducer.plan.buckets, replica.managed).save(written)
        written.rename(plan)
    sys.exit(0)


def _follow(plan: Path, *_: object) -> None:
    if plan.exists():
        sys.exit(0)
