"""Derives advice from the measurements."""

from __future__ import annotations

from dataclasses import dataclass

from ddpx.timeline.analyze.diagnoses import DIAGNOSES
from ddpx.timeline.analyze.evidence import Evidence
from ddpx.timeline.model import Recording


@dataclass(frozen=True)
class Finding:
    """A cause of waiting that a recording shows.

    Attributes:
        cause: The name of the cause, as in docs/advice.md.
        sentence: The measurement, and what to do.
    """

    cause: str
    sentence: str


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
