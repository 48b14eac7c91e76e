"""Makes ranks fail under ddpx and torch's DDP. Writes what users see into docs/reliability.md.

make reliability
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from marked_page import write_between_marks
from tabulate import tabulate
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP, __version__

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "faults"))

from fault_cases import Case, Report, train  # type: ignore[import-not-found]  # noqa: E402
from fault_ranks import Ending, run_ranks  # type: ignore[import-not-found]  # noqa: E402
from mistakes import MISTAKES, Outcome, make_mistake  # type: ignore[import-not-found]  # noqa: E402

WORLD_SIZE = 3
MANY_RANKS = 64
GROUP_TIMEOUT_S = 20.0
_MOST_CHARACTERS = 420

CONTENDERS: dict[str, tuple[str, type[nn.Module]]] = {
    "ddpx over gloo": ("gloo", ReducerDDP),
    "ddpx over shm": ("shm", ReducerDDP),
    "DDP over gloo": ("gloo", DistributedDataParallel),
}
# The faults: which rank, how, where.
case_of = partial(Case, world_size=WORLD_SIZE)
TROUBLE: dict[str, Case] = {
    "killed (as by the out-of-memory killer), in backward": case_of("kill", "gradient hook"),
    "killed, while it waits for a bucket": case_of("kill", "waiting"),
    "rank 0 killed, which hosts the store": case_of("kill", "bucket in flight", victim=0),
    "rank 0 killed with the store, before ranks have met": case_of(
        "kill", "before wrapping", victim=0
    ),
    f"one of {MANY_RANKS} ranks killed, in backward": Case(
        "kill", "gradient hook", world_size=MANY_RANKS
    ),
    "segmentation fault in forward": case_of("segfault", "forward"),
    "`os._exit(3)` between steps": case_of("exit", "between steps"),
    "exception in forward": case_of("exception", "forward"),
    "exception in a communication hook": case_of("exception", "communication hook"),
    "exception before the model is wrapped": case_of("exception", "before wrapping"),
    "3 s late (`DDPX_STALL_WARN=0.5`)": case_of("stall", "gradient hook"),
    "3 s late (`set_stall_timeout(error=1.5)`)": case_of("stall, raise", "forward"),
    "stopped by SIGSTOP (`set_stall_timeout(error=1.5)`)": case_of("stop, raise", "gradient hook"),
    "killed, on another host": case_of("kill", "gradient hook", hosts=2),
    "rank 0 killed with the store, on another host": case_of(
        "kill", "gradient hook", victim=0, hosts=2
    ),
}
MISTAKE_NAMES = {f"one rank {what}": what for what in MISTAKES}


@dataclass(frozen=True)
class Sight:
    """What a user sees on one surviving rank.

    Attributes:
        text: An error or a warning. Empty if there was none.
        seconds: Seconds from the fault to the text. None if there was none.
    """

    text: str
    seconds: float | None


def see(endings: list[Ending], victim: int) -> Sight:
    """What the survivor with the last report shows."""
    fault = endings[victim].marks["fault"]
    sights = []
    for rank, ending in enumerate(endings):
        if rank == victim:
            continue
        if not isinstance(ending.value, Report | Outcome):
            sights.append(Sight(f"nothing: ended after {ending.exit_code}", None))
        elif ending.value.text:
            sights.append(Sight(ending.value.text, ending.value.at_s - fault))
        else:
            logged = ending.value.logged if isinstance(ending.value, Report) else ()
            warnings = [text for event, text in logged if event == "stalled"]
            sights.append(Sight("warning: " + warnings[-1] if warnings else "", None))
    return max(sights, key=lambda sight: (sight.seconds is not None, sight.seconds or 0.0))


def shortened(text: str) -> str:
    """The text in one line, without parts that are always the same."""
    text = text.split(" The gradients of this step")[0]
    text = " ".join(text.split()).replace("|", "\\|").replace(str(ROOT), "...")
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + " ..."


def _run(name: str, contender: str) -> Sight:
    backend, wrap = CONTENDERS[contender]
    if name in MISTAKE_NAMES:
        endings = run_ranks(
            WORLD_SIZE,
            make_mistake,
            MISTAKE_NAMES[name],
            wrap,
            backend=backend,
            identities="AAB" if "another host" in name else "",
            timeout_s=GROUP_TIMEOUT_S,
        )
        return see(endings, WORLD_SIZE - 1)
    case = TROUBLE[name]
    case = replace(case, transport=backend)
    endings = run_ranks(
        case.world_size,
        train,
        case,
        wrap,
        True,  # whole_stall
        backend=backend,
        identities=case.identities,
        environment=case.environment,
        timeout_s=GROUP_TIMEOUT_S,
    )
    return see(endings, case.victim_rank)


def _cell(sight: Sight) -> str:
    if not sight.text:
        return "nothing; it trains on"
    return f"`{shortened(sight.text)}`" if "`" not in sight.text else shortened(sight.text)


def _seconds(sight: Sight) -> str:
    return "-" if sight.seconds is None else f"{sight.seconds:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "reliability.md")
    parser.add_argument("--only", help="only faults with this text in their names; writes no file")
    arguments = parser.parse_args()
    names = [n for n in [*TROUBLE, *MISTAKE_NAMES] if arguments.only is None or arguments.only in n]
    sections, summary = [], []
    for name in names:
        sights = {contender: _run(name, contender) for contender in CONTENDERS}
        two_hosts = "another host" in name
        kind = "identities injected into one machine" if two_hosts else "one machine"
        summary.append([name, kind, *(_seconds(sight) for sight in sights.values())])
        lines = [f"| {c} | {_seconds(s)} | {_cell(s)} |" for c, s in sights.items()]
        sections.append(
            f"### {name[0].upper()}{name[1:]}\n\n| | seconds | a survivor sees |\n|-|-:|-|\n"
            + "\n".join(lines)
        )
        print(sections[-1] + "\n", flush=True)
    if arguments.only is not None:
        return 0
    text = "\n\n".join(
        [
            f"torch {torch.__version__}, ddpx {__version__}, {WORLD_SIZE} ranks unless a row says "
            f"otherwise, group timeout {GROUP_TIMEOUT_S:.0f} s (torch's default is 30 minutes). "
            "Seconds from the fault to the error on the survivor that got it last.",
            "## In how many seconds\n\n"
            + tabulate(
                summary,
                ["fault", "kind of host", *CONTENDERS],
                tablefmt="github",
                colalign=("left", "left", "right", "right", "right"),
                disable_numparse=True,
            ),
            "## What they see",
            *sections,
        ]
    )
    write_between_marks(arguments.document, "reliability", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
