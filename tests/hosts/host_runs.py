"""Runs cases, several at a time since ranks mostly wait, and keeps the events of their ranks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from host_cases import Case
from host_ranks import Event, RankedHosts

AT_ONCE = 6
_START_LIMIT_S = 60.0
_FIRST_STEPS = 3  # the buckets have been rebuilt, and ranks know each other
_STEPS_AFTERWARDS = 2
_AFTERWARDS_LIMIT_S = 60.0
_ANSWER_LIMIT_S = 10.0
_MARGIN_S = 1.0
_POLL_S = 0.05


@dataclass
class Outcome:
    """The events of one case.

    Attributes:
        victims: The ranks that the trouble affects.
        events: By rank.
        began_s: The time of the trouble's begin, by time.monotonic(). 0: training did not start.
        ended_s: The time of the trouble's end.
        outputs: What ranks wrote to stderr.
    """

    case: Case
    victims: set[int]
    events: list[list[Event]]
    began_s: float = 0.0
    ended_s: float = 0.0
    outputs: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> set[int]:
        return {*range(len(self.events))}

    @property
    def reporters(self) -> set[int]:
        """The ranks that must report a loss."""
        return self.ranks if self.case.trouble.both_sides else self.ranks - self.victims

    def lost_by(self, rank: int) -> set[int]:
        """The ranks that this rank cannot reach, or that have ended."""
        return self.ranks - self.victims if rank in self.victims else self.victims

    def first(self, rank: int, *names: str, after_s: float = 0.0) -> Event | None:
        events = self.events[rank]
        return next((e for e in events if e["event"] in names and e["at"] > after_s), None)

    def last_step(self, rank: int) -> int:
        return max((e["step"] for e in self.events[rank] if e["event"] == "step"), default=-1)

    def have(self, ranks: Iterable[int], *names: str, after_s: float = 0.0) -> bool:
        """Whether each of these ranks has one of these events."""
        return all(self.first(rank, *names, after_s=after_s) for rank in ranks)

    def have_steps(self, num_steps: int, after_s: float = 0.0) -> bool:
        """Whether each rank has made so many steps."""
        steps = [
            [e for e in own if e["event"] == "step" and e["at"] > after_s] for own in self.events
        ]
        return all(len(own) >= num_steps for own in steps)

    def any_error(self) -> bool:
        return any(self.first(rank, "error") for rank in self.ranks)

    def report_s(self, rank: int) -> float | None:
        """Seconds from the trouble to this rank's error."""
        error = self.first(rank, "error")
        return None if error is None else max(0.0, error["at"] - self.began_s)


class _Run:
    """The course of one case."""

    def __init__(self, case: Case, hosts: RankedHosts) -> None:
        self.trouble, self.victim, self.hosts = case.trouble, case.victim_rank, hosts
        beside = hosts.ranks_beside(self.victim)
        victims = beside if self.trouble.whole_host else {self.victim}
        self.outcome = Outcome(case, victims, [[] for _ in range(hosts.num_ranks)])

    def run(self) -> Outcome:
        settings = [self.trouble.settings(r, r == self.victim) for r in range(self.hosts.num_ranks)]
        self.hosts.start(self.outcome.case.transport, settings, self.trouble.store_delay_s)
        if "num_steps" in settings[0]:
            self._await("compared", _START_LIMIT_S, self.outcome.ranks)
        elif self._await_steps(_FIRST_STEPS, _START_LIMIT_S):
            self._make_trouble()
        self.outcome.outputs = [self.hosts.output(rank) for rank in range(self.hosts.num_ranks)]
        return self.outcome

    def _make_trouble(self) -> None:
        trouble, outcome = self.trouble, self.outcome
        outcome.began_s = time.monotonic()
        end = trouble.begin(self.hosts, self.victim)
        if trouble.report_limit_s is not None:
            if self._await("error", trouble.report_limit_s + _MARGIN_S, outcome.reporters):
                self._await("shrunk refused", _ANSWER_LIMIT_S, outcome.reporters)
            time.sleep(max(0.0, outcome.began_s + trouble.lasts_s - time.monotonic()))
        else:
            self._poll(outcome.any_error, trouble.lasts_s)
        outcome.ended_s = time.monotonic()
        end()
        if trouble.report_limit_s is None:
            self._await_steps(_STEPS_AFTERWARDS, _AFTERWARDS_LIMIT_S, outcome.ended_s)
        elif trouble.lasts_s:
            self._await("error", _ANSWER_LIMIT_S, outcome.victims, outcome.ended_s)

    def _poll(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Waits for a condition of the events. Returns whether it came true in time."""
        deadline = time.monotonic() + limit_s
        while True:
            self.outcome.events = [self.hosts.events(rank) for rank in range(self.hosts.num_ranks)]
            if condition() or time.monotonic() > deadline:
                return condition()
            time.sleep(_POLL_S)

    def _await(self, names: str, limit_s: float, ranks: set[int], after_s: float = 0.0) -> bool:
        """Waits until each rank has one of these events."""
        have = functools.partial(self.outcome.have, ranks, *names.split(), after_s=after_s)
        return self._poll(have, limit_s)

    def _await_steps(self, num_steps: int, limit_s: float, after_s: float = 0.0) -> bool:
        outcome = self.outcome
        return self._poll(
            lambda: outcome.any_error() or outcome.have_steps(num_steps, after_s), limit_s
        )


def run(case: Case) -> Outcome:
    """Runs one case. Raises CannotEmulate if this machine does not permit hosts."""
    with RankedHosts(case.ranks_per_host) as hosts:
        return _Run(case, hosts).run()


class Runs:
    """All given cases, run in their order. A context manager."""

    def __init__(self, cases: Iterable[Case], at_once: int = AT_ONCE) -> None:
        self._pool = ThreadPoolExecutor(at_once)
        self._futures: dict[Case, Future[Outcome]] = {
            case: self._pool.submit(run, case) for case in cases
        }

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def outcome(self, case: Case) -> Outcome:
        """Waits for the case."""
        return self._futures[case].result()
