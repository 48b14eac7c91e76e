"""Compares two recordings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from statistics import median
from typing import Any

from ddpx.cli.timeline.verdict import Verdict
from ddpx.timeline.analyze.summary import RankSummary, Summary
from ddpx.timeline.texts import table

_MIB = 1 << 20
_UNEXPLAINED = 0.25  # the share of a difference for which parts of the step need not account
_RANK_HEADERS = ("rank", "step", "compute", "comm.", "overlapped", "exposed")
_RANK_TIMES = ("step", "compute", "communication", "overlapped", "exposed")
_BUCKET_HEADERS = ("bucket", "MiB", "params", "ready", "comm.", "completed", "exposed")


def comparison_text(
    new: Sequence[Summary],
    base: Sequence[Summary],
    verdict: Verdict | None,
    new_name: str,
    base_name: str,
) -> str:
    """Tables of ranks and buckets of the first launches, and the verdict.

    Args:
        new: The summaries of the launches of a recording.
        base: The summaries of the launches of the recording to compare with.
        verdict: The verdict on the step times. None: too few steps.
        new_name: The name of the recording in the text.
        base_name: The name of the other recording.
    """
    of_launches = " of one launch each" if len(new) + len(base) > 2 else ""
    return "\n".join(
        [
            f"{base_name} -> {new_name} (ratio). Times are medians{of_launches}, in ms.",
            "",
            "Ranks.",
            "",
            _ranks(new[0], base[0]),
            "",
            "Buckets. Times start at the start of backward; comm. is from launch to completion.",
            "",
            _buckets(new[0], base[0]),
            "",
            _verdict_text(new, base, verdict, new_name),
        ]
    )


def _ranks(new: Summary, base: Summary) -> str:
    times = [attrgetter(f"{name}_ms") for name in _RANK_TIMES]
    sides = [{rank.rank: rank for rank in summary.ranks} for summary in (base, new)]
    return table(_RANK_HEADERS, list(_rows(sides, (), times)))


def _buckets(new: Summary, base: Summary) -> str:
    texts = (lambda b: f"{b.num_bytes / _MIB:.2f}", lambda b: str(b.num_params))
    times = (
        attrgetter("ready_ms"),
        lambda b: b.completed_ms - b.launched_ms,
        attrgetter("completed_ms"),
        attrgetter("exposed_ms"),
    )
    sides = [{bucket.index: bucket for bucket in summary.buckets} for summary in (base, new)]
    return table(_BUCKET_HEADERS, list(_rows(sides, texts, times)))


def _rows(
    sides: Sequence[Mapping[int, Any]],
    texts: Sequence[Callable[[Any], str]],
    times: Sequence[Callable[[Any], float]],
) -> Iterator[list[object]]:
    """A row for each rank or bucket of either recording: its number, its texts and its times."""
    for number in sorted(set().union(*sides)):
        pair = [side.get(number) for side in sides]
        yield [
            number,
            *(" -> ".join("-" if item is None else text(item) for item in pair) for text in texts),
            *(_change(*(None if item is None else ms(item) for item in pair)) for ms in times),
        ]


def _change(before: float | None, after: float | None) -> str:
    texts = ["-" if value is None else f"{value:.2f}" for value in (before, after)]
    ratio = f" ({after / before:.2f})" if before and after is not None else ""
    return f"{' -> '.join(texts)}{ratio}"


def _verdict_text(
    new: Sequence[Summary], base: Sequence[Summary], verdict: Verdict | None, new_name: str
) -> str:
    if verdict is None:
        text = (
            "Too few steps for a verdict (at least 15 in each recording, or 4 launches in total)."
        )
    else:
        figures = (
            f"{verdict.before_ms:.2f} -> {verdict.after_ms:.2f} ms on the slowest rank. The ratio "
            f"lies between {verdict.low:.2f} and {verdict.high:.2f} (99 %, {verdict.basis})"
        )
        if verdict.is_slower or verdict.is_faster:
            text = (
                f"Steps of {new_name} are {'slower' if verdict.is_slower else 'faster'}, "
                f"{verdict.ratio:.2f} times as long: {figures}.{_main_part(new, base)}"
            )
        else:
            text = f"No difference seen: {figures}."
        if "blocks" in verdict.basis:
            text += (
                " The noise between launches is not known. Record both with `ddpx timeline "
                "--launches 3`."
            )
    if new[0].world_size != base[0].world_size:
        text += f" The numbers of ranks differ: {base[0].world_size} and {new[0].world_size}."
    elif len(new[0].ranks) != len(base[0].ranks):
        text += (
            f" The numbers of recorded ranks differ: {len(base[0].ranks)} and {len(new[0].ranks)}."
        )
    sizes = [[(b.num_params, b.num_bytes) for b in side[0].buckets] for side in (new, base)]
    if sizes[0] != sizes[1]:
        text += " The buckets of the recordings differ."
    return text


def _main_part(new: Sequence[Summary], base: Sequence[Summary]) -> str:
    """The part of the step that makes most of the difference. Empty if no part is known to."""

    def change(name: str) -> float:
        after, before = (median(getattr(_slowest(s), name) for s in side) for side in (new, base))
        return after - before

    whole = change("step_ms")
    parts = {"compute": change("compute_ms"), "exposed communication": change("exposed_ms")}
    if not whole:
        return ""
    name = max(parts, key=lambda part: parts[part] / whole)
    unexplained = abs(sum(parts.values()) - whole)
    if unexplained > _UNEXPLAINED * abs(whole) or not 0.5 < parts[name] / whole < 1.5:
        return ""
    return f" Most of the difference is {name}, {parts[name]:+.2f} ms."


def _slowest(summary: Summary) -> RankSummary:
    """The slowest rank. All ranks wait for this rank."""
    return max(summary.ranks, key=lambda rank: rank.step_ms)
