"""A rank of ``ddpx plan``: a rank of ``ddpx run`` that ends with its search."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ddpx.cli import runner
from ddpx.comm.process_group import rank_of_job
from ddpx.ddp.search import wrapper_search
from ddpx.ddp.search.wrapper_search import Searched
from ddpx.planning import plan_of

PLAN, REPORT = "plan.json", "report.json"


def main(words: Sequence[str]) -> None:
    """Runs the script until its first search has ended. The first word is a folder for results."""
    folder, *script = words
    wrapper_search.call_at_end(functools.partial(_leave, Path(folder)))
    runner.main(script)


def _leave(folder: Path, replica: Searched) -> None:
    """Ends the script on all ranks, at the same forward. Rank 0 writes the results."""
    assert replica.plan_report is not None
    if rank_of_job(replica.group) == 0:
        plan_of(replica.reducer.plan.buckets, replica.managed).save(folder / PLAN)
        (folder / REPORT).write_text(json.dumps(replica.plan_report.to_json()))
    sys.exit(0)
