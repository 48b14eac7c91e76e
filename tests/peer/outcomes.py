"""The outcome of one test with one class."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Outcome:
    """The outcome of one test with one class."""

    status: str
    """"pass", "fail", "skip", "timeout" or "crash"."""
    reason: str = ""
    built: int = 0
    """Wrappers of the class under test that rank 0 began to construct."""
    seconds: float = 0.0
    details: str = ""
    """Traceback of the first rank that failed, and what ranks printed."""
    weights: str = ""
    """Digest of the final weights, if the test prints a digest."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
