"""Compares two recordings."""

from __future__ import annotations

import math

from ddpx.timeline.analyze.summary import BucketSummary, RankSummary, Summary
from ddpx.timeline.tables import table

_MIB = 1 << 20
# The medians of two runs of one training differ by this share on a quiet machine. They differ more
# if the steps of a run differ.
_SAME = 0.03
_ERRORS = 2  # in standard errors
_RANK_HEADERS = ("rank", "step", "compute", "comm.", "overlapped", "exposed")
_BUCKET_HEADERS = ("bucket", "MiB", "params", "ready", "comm.", "completed", "exposed")


def comparison_text(new: Summary, base: Summary, new_name: str, base_name: str) -> str:
    """Tables of ranks and buckets, and a verdict. Ratios are ``new`` divided by ``base``."""
    return "\n".join(
        [
            f"{base_name} → {new_name} (ratio). Times are medians in ms.",
            "",
            "Ranks.",
            "",
            _ranks(new, base),
            "",
            "Buckets. Times start at the start of backward; comm. is from launch to completion.",
            "",
            _buckets(new, base),
            "",
            _verdict(new, base, new_name, base_name),
        ]
    )


def _ranks(new: Summary, base: Summary) -> str:
    olds = {rank.rank: rank for rank in base.ranks}
    news = {rank.rank: rank for rank in new.ranks}
    rows = []
    for number in sorted(olds | news):
        pair = (olds.get(number), news.get(number))
        rows.append(
            [
                number,
                _change(*(None if r is None else r.step_ms for r in pair)),
                _change(*(None if r is None else r.compute_ms for r in pair)),
                _change(*(None if r is None else r.communication_ms for r in pair)),
                _change(*(None if r is None else r.overlapped_ms for r in pair)),
                _change(*(None if r is None else r.exposed_ms for r in pair)),
            ]
        )
    return table(_RANK_HEADERS, rows)


def _buckets(new: Summary, base: Summary) -> str:
    olds = {bucket.index: bucket for bucket in base.buckets}
    news = {bucket.index: bucket for bucket in new.buckets}
    rows = []
    for index in sorted(olds | news):
        pair = (olds.get(index), news.get(index))
        rows.append(
            [
                index,
                " → ".join("-" if b is None else f"{b.num_bytes / _MIB:.2f}" for b in pair),
                " → ".join("-" if b is None else str(b.num_params) for b in pair),
                _change(*(None if b is None else b.ready_ms for b in pair)),
                _change(*(None if b is None else _communication_ms(b) for b in pair)),
                _change(*(None if b is None else b.completed_ms for b in pair)),
                _change(*(None if b is None else b.exposed_ms for b in pair)),
            ]
        )
    return table(_BUCKET_HEADERS, rows)


def _communication_ms(bucket: BucketSummary) -> float:
    return bucket.completed_ms - bucket.launched_ms


def _change(before: float | None, after: float | None) -> str:
    texts = ["-" if value is None else f"{value:.2f}" for value in (before, after)]
    ratio = f" ({after / before:.2f})" if before and after is not None else ""
    return f"{' → '.join(texts)}{ratio}"


def _verdict(new: Summary, base: Summary, new_name: str, base_name: str) -> str:
    """Compares the slowest ranks, because all ranks wait for the slowest rank."""
    one, other = _slowest(base), _slowest(new)
    if not one.step_ms:
        return f"{base_name} has no step times to compare with."
    ratio = other.step_ms / one.step_ms
    times = f"{one.step_ms:.2f} → {other.step_ms:.2f} ms on the slowest rank"
    noise_ms = _noise_ms(new, base)
    if noise_ms is None:
        verdict = f"Too few steps for a verdict (at least 3 are needed): {times}."
    elif abs(other.step_ms - one.step_ms) <= noise_ms:
        verdict = f"Steps take as long as in {base_name}: {times}, noise ±{noise_ms:.2f} ms."
    else:
        changes = {
            "compute": other.compute_ms - one.compute_ms,
            "exposed communication": other.exposed_ms - one.exposed_ms,
        }
        word, reason = ("slower", max) if ratio > 1 else ("faster", min)
        cause = reason(changes, key=lambda name: changes[name])
        verdict = (
            f"Steps of {new_name} are {word}, {ratio:.2f} times as long: {times}. Most of the "
            f"difference is {cause}, {changes[cause]:+.2f} ms."
        )
    if new.world_size != base.world_size:
        verdict += f" But the numbers of ranks differ: {base.world_size} and {new.world_size}."
    if [b.num_params for b in new.buckets] != [b.num_params for b in base.buckets]:
        verdict += " The buckets of the recordings differ."
    return verdict


def is_slower(new: Summary, base: Summary) -> bool:
    """Whether the steps of ``new`` take longer than the steps of ``base``, by more than the noise.

    The slowest rank of each recording counts. The noise is the larger of two values: 3 % of the
    step of ``base``, and twice the standard error of the difference of the medians.
    """
    noise_ms = _noise_ms(new, base)
    return noise_ms is not None and _slowest(new).step_ms - _slowest(base).step_ms > noise_ms


def _noise_ms(new: Summary, base: Summary) -> float | None:
    """The noise in ms. None if there are too few steps."""
    one, other = _slowest(base), _slowest(new)
    if one.step_error_ms is None or other.step_error_ms is None:
        return None
    chance = math.hypot(one.step_error_ms, other.step_error_ms)
    return max(_SAME * one.step_ms, _ERRORS * chance)


def _slowest(summary: Summary) -> RankSummary:
    return max(summary.ranks, key=lambda rank: rank.step_ms)
