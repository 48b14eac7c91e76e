"""The causes of waiting that ddpx can name, in the order of explanation.

docs/advice.md lists them for users, with a table of how often they are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from ddpx.errors import count
from ddpx.timeline.analyze import diagnose_communication as communication
from ddpx.timeline.analyze import diagnose_ranks as ranks
from ddpx.timeline.analyze.cores import shared_cores
from ddpx.timeline.analyze.evidence import Evidence
from ddpx.timeline.analyze.transfers import write_back_ns
from ddpx.timeline.model import Recording
from ddpx.timeline.texts import size_text

_MS = 1e6
_SHORT_OF_CORES = 0.10  # of the recording
_UNUSED = 0.05  # of the bytes
_MUCH_CLOCK_ERROR = 0.10  # of the step


@dataclass(frozen=True)
class Diagnosis:
    """A cause of waiting.

    Attributes:
        cause: The name of the cause, as in docs/advice.md.
        find: Returns sentences, each with a measurement and an action. None without the cause.
        explains: The causes whose signs follow from this cause, and which are not reported beside
            it.
    """

    cause: str
    find: Callable[[Evidence], Iterator[str]]
    explains: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Finding:
    """A cause of waiting that a recording shows.

    Attributes:
        cause: The name of the cause, as in docs/advice.md.
        sentence: The measurement, and what to do.
    """

    cause: str
    sentence: str


def _shared_cores(evidence: Evidence) -> Iterator[str]:
    if evidence.recording.device != "cpu":  # the cores only launch the work
        return
    waits = evidence.recording.core_waits
    for shared in shared_cores(evidence.recording):
        known = [rank for rank in shared.ranks if rank in waits]
        worst = max(known, key=lambda rank: waits[rank], default=None)
        lack = ""
        if worst is not None:
            if waits[worst] < _SHORT_OF_CORES:
                continue
            lack = f", and rank {worst} is without a core for {waits[worst]:.0%} of the time"
        if shared.threads_each:
            remedy = f"Set OMP_NUM_THREADS={shared.threads_each}"
        else:
            remedy = f"Start at most {count(shared.num_cores, 'rank')} there"
        yield f"{shared}{lack}. {remedy}, or use more cores."


def _unused_parameters(evidence: Evidence) -> Iterator[str]:
    unused, recording = evidence.unused, evidence.recording
    share = evidence.share_of(unused)
    if share < _UNUSED:
        return
    num_bytes = sum(evidence.sent_bytes[param] for param in unused)
    names = [recording.param_names[param] for param in unused[:2]]
    if len(unused) > 2:
        names.append("…")
    params = count(len(unused), "parameter")
    steps = count(len(evidence.whole_steps), "step")
    yield (
        f"{params} ({', '.join(names)}) got no gradient on any rank in {steps}, and "
        f"{size_text(num_bytes)} of zeros a step are sent for "
        f"{'it' if len(unused) == 1 else 'them'}, {share:.0%} of all bytes. Call "
        "requires_grad_(False) on such parameters before you wrap the model."
    )


def _write_back(evidence: Evidence) -> Iterator[str]:
    spent = {
        rank: [write_back_ns(step.ranks[rank]) for step in evidence.steps if rank in step.ranks]
        for rank in evidence.recording.hosts
    }
    rank = max(spent, key=lambda r: median(spent[r]) if spent[r] else 0.0)
    if evidence.is_worth_a_word(spent[rank]):
        yield (
            f"Copying averaged gradients back takes {median(spent[rank]) / _MS:.1f} ms a step on "
            f"rank {rank}: with gradient_as_bucket_view=True there is nothing to copy."
        )


def _clocks(evidence: Evidence) -> Iterator[str]:
    errors_ms = {r: clock.error_ns / _MS for r, clock in evidence.recording.clocks.items()}
    worst = max(errors_ms, key=lambda rank: errors_ms[rank])
    if errors_ms[worst] > _MUCH_CLOCK_ERROR * evidence.step_ms:
        yield (
            f"The clock of rank {worst} is known to {errors_ms[worst]:.2f} ms only. Waits for "
            "ranks that are not longer are not reported: record more machines with a quiet network."
        )


_LARGE = frozenset({"large bucket"})
_LATE = _LARGE | {"late first bucket"}
_LINK = _LATE | {"slow link"}
_COMMUNICATION = _LINK | {"small buckets"}
_RANKS = frozenset({"late start", "late gradient", "slow compute"})

DIAGNOSES = (
    Diagnosis("shared cores", _shared_cores, _RANKS | _COMMUNICATION | {"write-back"}),
    Diagnosis("late start", ranks.late_start),
    Diagnosis("late gradient", ranks.late_gradient),
    Diagnosis("slow compute", ranks.slow_compute),
    Diagnosis("unused parameters", _unused_parameters),
    Diagnosis("small buckets", communication.small_buckets, _LINK),
    Diagnosis("slow link", communication.slow_link, _LATE),
    Diagnosis("late first bucket", communication.late_first_bucket, _LARGE),
    Diagnosis("large bucket", communication.large_bucket),
    Diagnosis("write-back", _write_back),
    Diagnosis("clocks", _clocks),
)


def diagnose(recording: Recording) -> list[Finding]:
    """Returns the causes of waiting, in the order of explanation. Empty if there are none.

    A cause is left out if a cause before it explains its signs.

    Raises:
        RuntimeError: No complete step was recorded.
    """
    evidence = Evidence(recording)
    found: list[Finding] = []
    explained: set[str] = set()
    for diagnosis in DIAGNOSES:
        if diagnosis.cause in explained:
            continue
        sentences = list(diagnosis.find(evidence))
        found += [Finding(diagnosis.cause, sentence) for sentence in sentences]
        if sentences:
            explained |= diagnosis.explains
    return found


def advise(recording: Recording) -> list[str]:
    """Returns the sentences of :func:`diagnose`.

    Raises:
        RuntimeError: No complete step was recorded.
    """
    return [finding.sentence for finding in diagnose(recording)]
