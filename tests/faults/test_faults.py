"""One rank fails at any place. Every survivor reports the rank, the cause and the place in time."""

from __future__ import annotations

from typing import Any

import pytest
from fault_cases import CAUSE, FAULTS, MODES, PHASES, STEP, Case, Report, train
from fault_ranks import Ending, HoldUps, run_ranks
from pairwise import all_rows, cover

DEADLINE_S = 5.0
# Ranks of other hosts, after the death of the rank that serves the store. A rank that connects to
# the store at this moment gets no answer.
STORE_LOST_S = 8.0
SEED = 6
VALUES: dict[str, Any] = {
    "fault": FAULTS,
    "phase": PHASES,
    "transport": ("gloo", "shm"),
    "world_size": (2, 3, 4),
    "victim": (0, -1),
    "mode": tuple(MODES),
}
EXIT_CODES = {"kill": -9, "segfault": -11, "exit": 3, "exception": 1}
ENDINGS = {
    "kill": "was killed by SIGKILL",
    "segfault": "was killed by SIGSEGV",
    "exit": "ended with exit code 3",
    "exception": "raised an exception that ended its script",
}


def _valid(row: dict[str, Any]) -> bool:
    # Only another thread, or the kernel, can end a rank that waits. An exception in another thread
    # does not end it, and if one thread sleeps the others continue.
    own_thread = row["fault"] in ("exception", "stall", "stall, raise")
    if row["phase"] == "waiting":
        return not own_thread and row["world_size"] > 2
    return True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full")
        rows = all_rows(VALUES, _valid)
        if not full:
            rows = [rows[index] for index in cover(rows, SEED)]
        metafunc.parametrize("case", [Case(**row) for row in rows], ids=str)


def run(case: Case) -> list[Ending]:
    return run_ranks(
        case.world_size,
        train,
        case,
        backend=case.transport,
        identities=case.identities,
        environment=case.environment,
    )


def check(case: Case, endings: list[Ending]) -> None:
    victim = case.victim_rank
    for rank, ending in enumerate(endings):
        if rank == victim and case.fault in EXIT_CODES:
            assert ending.exit_code == EXIT_CODES[case.fault], endings[victim]
            continue
        assert isinstance(ending.value, Report), (rank, ending)
        assert ending.exit_code == 0, (rank, ending)
        if case.fault in EXIT_CODES:
            _check_survivor(case, rank, ending.value, endings[victim].marks["fault"])
        elif case.fault == "stall":
            _check_patient(case, rank, ending.value)
        else:
            since = endings[victim].marks["awake" if rank == victim else "fault"]
            _check_impatient(case, rank, ending.value, since)
    if case.fault == "stall":
        reports = [ending.value for rank, ending in enumerate(endings) if rank != victim]
        texts = [text for report in reports for _, text in report.logged]
        assert any(f"missing: rank {victim}, " in text for text in texts), texts


def _check_survivor(case: Case, rank: int, report: Report, since_s: float) -> None:
    where = (rank, report)
    assert report.kind == "RankFailure", where
    assert report.reported_by == rank, where
    assert report.text.startswith(f"ddpx.RankFailure: [ddpx rank {rank}, "), where
    assert report.reason and report.reason in report.text, where
    at_construction = report.phase == "construction"
    # Ranks that have finished their construction wait in the first step for the rank that died in
    # its construction.
    step = -1 if at_construction else 0 if case.phase == "construction" else STEP
    # A rank that waits has given its gradients, so the others may have finished this step. In the
    # next one they come no further than to the buffers of rank 0, or to their first bucket.
    may_be_over = case.phase == "waiting"
    assert report.step == step or (may_be_over and report.step == step + 1), where
    assert at_construction or f", step {report.step}, phase " in report.text, where
    assert f" rank {case.victim_rank} (host " in report.text, where
    loses_store = case.hosts > 1 and case.victim_rank == 0
    limit_s = STORE_LOST_S if loses_store else DEADLINE_S
    assert report.at_s - since_s < limit_s, (report.at_s - since_s, where)
    if case.at_construction:  # ranks may not have exchanged addresses yet
        assert case.victim_rank in report.ranks, where
    else:
        assert report.ranks == (case.victim_rank,), where
    if report.host == "unknown":
        assert case.at_construction and case.fault != "exception", where
        return
    assert report.host, where
    if case.hosts == 1:
        assert report.what in (ENDINGS[case.fault], "died"), where
        # Who dies before ranks have met takes its status page along.
        unseen = case.at_construction and not report.last_seen
        assert unseen or _doing(case) in report.last_seen, where
    if case.fault == "exception":
        assert CAUSE in report.cause and "Error: " in report.cause, where
    if report.phase == "waiting for buckets":
        assert report.bucket is not None and report.params, where
        assert f"This rank was waiting for bucket {report.bucket} ('" in report.text, where
        assert report.params[0] in report.text, where


def _doing(case: Case) -> str:
    """The last state of the victim in the reports."""
    return {
        "before wrapping": "user code, before its first step",
        "construction": "construction of the wrapper",
        "forward": f"step {STEP}, phase forward",
        "gradient hook": f"step {STEP}, phase backward",
        "bucket in flight": f"step {STEP}, phase backward",
        "waiting": f"step {STEP}, phase waiting for buckets, bucket ",
        "communication hook": f"step {STEP}, phase communication hook, bucket 1 ('layers.",
        "between steps": "phase between steps",
    }[case.phase]


def _check_patient(case: Case, rank: int, report: Report) -> None:
    """The rank warns, and continues after the late rank has arrived."""
    assert report.kind == "", (rank, report)
    if rank == case.victim_rank:
        return
    warnings = [text for event, text in report.logged if event == "stalled"]
    late = [text for text in warnings if case.is_warning(text)]
    # A rank that waits for no rank has no reason to warn: rank 0 sends its buffers and continues.
    assert late or (case.phase == "before wrapping"), (rank, report)
    assert all(text.startswith(f"[ddpx] rank {rank} has waited ") for text in late), late
    assert not late or ("stall_over" in [event for event, _ in report.logged]), report


def _check_impatient(case: Case, rank: int, report: Report, since_s: float) -> None:
    assert report.kind == "RankStalled", (rank, report)
    assert report.reported_by == rank, report
    # without the store of rank 0, ranks may not have exchanged addresses
    if case.phase == "before wrapping":
        assert case.victim_rank in report.ranks, (rank, report)
    else:
        assert report.ranks == (case.victim_rank,), (rank, report)
    assert report.at_s - since_s < DEADLINE_S, (report.at_s - since_s, report)
    assert f"rank {case.victim_rank} (host " in report.text, report
    assert report.reason.startswith("has not come for "), report
    assert report.reason in report.text, report
    assert ("] this rank is the late one, " in report.text) == (rank == case.victim_rank), (
        report.text
    )


@pytest.mark.timeout(90)
def test_every_survivor_says_who_what_where(case: Case) -> None:
    with HoldUps() as hold_ups:
        endings = run(case)
    # pytest shows this if the test fails. A wait does not count time in which its rank was stopped.
    print(f"Processes were held up for at most {hold_ups.longest_s:.2f} s.", *endings, sep="\n")
    check(case, endings)


@pytest.mark.full_only
@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_all_survivors_of_64_ranks_name_the_rank_that_was_killed(transport: str) -> None:
    case = Case("kill", "gradient hook", transport, world_size=64)
    check(case, run(case))
