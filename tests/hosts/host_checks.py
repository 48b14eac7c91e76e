"""Compares the outcome of a case with what ranks must do."""

from __future__ import annotations

from host_runs import Outcome

_SHM_TOLERANCE = 1e-5  # between hosts, shm adds in another order than gloo


def check(outcome: Outcome) -> None:
    """Raises AssertionError with a sentence, and what ranks have written, in further lines."""
    trouble = outcome.case.trouble
    try:
        assert outcome.began_s or trouble.name == "train", f"no training: {outcome.events}"
        if trouble.name == "train":
            _check_weights(outcome)
        elif trouble.report_limit_s is None:
            _check_no_alarm(outcome)
        else:
            for rank in outcome.reporters:
                _check_report(outcome, rank, trouble.report_limit_s)
            _check_shrink(outcome)
            if trouble.lasts_s:
                _check_continued_host(outcome)
    except AssertionError as error:
        outputs = [f"rank {r}: {text}" for r, text in enumerate(outcome.outputs) if text]
        raise AssertionError("\n".join([str(error), *outputs])) from None


def _check_weights(outcome: Outcome) -> None:
    most = 0.0 if outcome.case.transport == "gloo" else _SHM_TOLERANCE
    digests = set()
    for rank in outcome.ranks:
        compared = outcome.first(rank, "compared")
        assert compared, f"rank {rank} did not train to the end\n{outcome.first(rank, 'error')}"
        difference = compared["difference"]
        assert difference <= most, f"rank {rank}: weights differ from DDP's by {difference}"
        digests.add(compared["digest"])
    assert len(digests) == 1, "weights differ between ranks"


def _check_no_alarm(outcome: Outcome) -> None:
    for rank in outcome.ranks:
        if error := outcome.first(rank, "error"):
            raise AssertionError(f"rank {rank} raises {error['kind']}\n{error['text']}")
    for rank in outcome.ranks:
        step = outcome.first(rank, "step", after_s=outcome.ended_s)
        assert step, f"rank {rank} makes no step after the trouble has ended"
    if outcome.case.trouble.warned_of:
        name = f"rank {outcome.case.victim_rank},"
        logs = [e["text"] for own in outcome.events for e in own if e["event"] == "log"]
        assert any(name in text for text in logs), f"no warning of the late {name}\n{logs}"


def _check_report(outcome: Outcome, rank: int, limit_s: float) -> None:
    error, seconds = outcome.first(rank, "error"), outcome.report_s(rank)
    assert error and seconds is not None, f"rank {rank} reports nothing within {limit_s:.0f} s"
    _check_kind(rank, error["kind"], error["text"])
    assert seconds <= limit_s, f"rank {rank} reports only after {seconds:.1f} s"
    named, lost = {*error["lost"]}, outcome.lost_by(rank)
    assert named, f"rank {rank} names no rank\n{error['text']}"
    assert named <= lost, f"rank {rank} names living ranks: {named - lost}\n{error['text']}"
    # Of the ranks on the machine of the store, other hosts can name the one that serves it.
    names_all = outcome.case.trouble.names_all and outcome.case.victim != "store"
    all_named = named == lost or not names_all
    assert all_named, f"rank {rank} names {named} of {lost}\n{error['text']}"


def _check_kind(rank: int, kind: str, text: str) -> None:
    assert kind == "RankFailure", f"rank {rank} raises {kind}, which is no RankFailure\n{text}"


def _check_shrink(outcome: Outcome) -> None:
    """At most the side of the store may shrink, and only if all ranks of that side do."""
    shrunk = set()
    for rank in outcome.reporters:
        answer = outcome.first(rank, "shrunk", "refused")
        assert answer, f"rank {rank}: shrink() neither ends nor refuses"
        if answer["event"] == "shrunk":
            shrunk.add(rank)
            continue
        text = answer["text"]
        is_sentence = text.endswith(".") and " " in text and "Traceback" not in text
        assert is_sentence, f"rank {rank}: shrink() refuses without a sentence\n{text}"
        assert answer["unchanged"], f"rank {rank}: shrink() refuses after changes\n{text}"
    if not shrunk:
        return
    side_of_store = outcome.ranks - outcome.lost_by(0)
    assert shrunk == side_of_store, f"ranks {shrunk} shrink; the store is with {side_of_store}"
    on_one_host = len(shrunk) <= outcome.case.ranks_per_host[0]
    assert on_one_host, f"ranks {shrunk} shrink across hosts"


def _check_continued_host(outcome: Outcome) -> None:
    """Its ranks raise before they make a step. A step that all ranks made may be printed late."""
    made_by_all = min(outcome.last_step(rank) for rank in outcome.reporters)
    for rank in outcome.victims:
        error = outcome.first(rank, "error", after_s=outcome.ended_s)
        assert error, f"rank {rank} raises nothing after its host continued"
        made = outcome.last_step(rank)
        assert made <= made_by_all, f"rank {rank} makes step {made} after its host continued"
        _check_kind(rank, error["kind"], error["text"])
