"""Diagnoses of ranks that others wait for. They return sentences for diagnoses.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from ddpx.timeline.analyze.evidence import Evidence, most_common
from ddpx.timeline.analyze.lateness import BACKWARD, BETWEEN, FORWARD, Lateness

_MS = 1e6
_ONE_GRADIENT = 0.7  # of the additional computation
_COMPARE = "Compare its inputs (batch size, sequence length) and its machine with theirs."
_REMEDIES = {
    FORWARD: _COMPARE,
    BETWEEN: "Look for what it alone does there, such as loading data, logging or saving.",
    BACKWARD: _COMPARE,
}


def late_start(evidence: Evidence) -> Iterator[str]:
    for rank in evidence.recording.hosts:
        late = evidence.lateness(rank)
        if evidence.is_worth_a_word([each.from_start for each in late]):
            start_ms = median(each.start for each in late) / _MS
            waited_ms = median(each.from_start for each in late) / _MS
            yield (
                f"Rank {rank} begins its step {start_ms:.1f} ms after the others"
                f"{_if_median(evidence)}: {_they_wait(evidence, rank, waited_ms)}. Look for "
                f"what rank {rank} alone does before forward, such as loading data, logging or "
                "saving."
            )


def late_gradient(evidence: Evidence) -> Iterator[str]:
    for rank in evidence.recording.hosts:
        late = evidence.lateness(rank)
        param = _late_param(late)
        if param is None or not evidence.is_worth_a_word([each.from_compute for each in late]):
            continue
        of_param = [each.gradient_ns for each in late if each.gradient == param]
        waited_ms = median(each.from_compute for each in late) / _MS
        yield (
            f"The gradient of {evidence.recording.param_names[param]} takes "
            f"{median(of_param) / _MS:.1f} ms longer on rank {rank} than on the others"
            f"{_if_median(evidence)}: {_they_wait(evidence, rank, waited_ms)}. Look for what "
            f"rank {rank} alone does there in backward, such as a hook or another branch."
        )


def slow_compute(evidence: Evidence) -> Iterator[str]:
    for rank, host in evidence.recording.hosts.items():
        late = evidence.lateness(rank)
        if _late_param(late) is not None:
            continue
        if not evidence.is_worth_a_word([each.from_compute for each in late]):
            continue
        waited_ms = median(each.from_compute for each in late) / _MS
        more = {name: median(each.stages[name] for each in late) / _MS for name in late[0].stages}
        where = max(more, key=lambda name: more[name])
        yield (
            f"Rank {rank} (host {host}) computes {median(_more_ns(late)) / _MS:.1f} ms a step "
            f"longer than the others{_if_median(evidence)}, {more[where]:.1f} ms of it in "
            f"{where}: {_they_wait(evidence, rank, waited_ms)}. {_REMEDIES[where]}"
        )


def _late_param(late: Sequence[Lateness]) -> int | None:
    """The parameter whose gradient makes a rank late. None if there is no such parameter."""
    param = most_common(each.gradient for each in late)
    if param is None:
        return None
    of_param = [each.gradient_ns if each.gradient == param else 0.0 for each in late]
    return param if median(of_param) > _ONE_GRADIENT * median(_more_ns(late)) > 0 else None


def _more_ns(late: Sequence[Lateness]) -> list[float]:
    return [sum(each.stages.values()) for each in late]


def _they_wait(evidence: Evidence, rank: int, waited_ms: float) -> str:
    others = [other for other in evidence.recording.hosts if other != rank]
    if len(others) == 1:
        return f"rank {others[0]} waits {waited_ms:.1f} ms a step for it"
    return f"other ranks wait up to {waited_ms:.1f} ms a step for it"


def _if_median(evidence: Evidence) -> str:
    return " (median)" if len(evidence.recording.hosts) > 2 else ""
