"""The log of the failure detector: the end of a script waits for the last message."""

from __future__ import annotations

import threading

import pytest

from ddpx import _C
from ddpx.health import log

_TIME_LIMIT_S = 10.0


@pytest.mark.timeout(60)
def test_the_end_waits_for_a_message_while_the_thread_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages, logged = ["the last message"], []
    is_taken, may_go_on = threading.Event(), threading.Event()

    def serve(message: str) -> None:
        is_taken.set()
        may_go_on.wait(_TIME_LIMIT_S)
        logged.append(message)

    class InterruptedThread(threading.Thread):
        """The thread that calls ``start`` loses its core before ``start`` returns."""

        def start(self) -> None:
            super().start()
            may_go_on.wait(_TIME_LIMIT_S)

    starter = threading.Thread(target=log._start_thread)
    delay = threading.Timer(0.2, may_go_on.set)
    monkeypatch.setattr(_C, "set_health_log_reader", lambda start: None)
    monkeypatch.setattr(_C, "take_health_record", lambda: messages.pop() if messages else None)
    monkeypatch.setattr(log, "_serve", serve)
    monkeypatch.setattr(threading, "Thread", InterruptedThread)
    starter.start()
    assert is_taken.wait(_TIME_LIMIT_S)
    delay.start()
    log.stop()
    assert logged == ["the last message"]
    starter.join()


@pytest.mark.timeout(60)
def test_the_end_does_not_wait_for_a_handler_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    messages, logged = ["second", "first"], []
    is_taken, end = threading.Event(), threading.Event()

    def serve(message: str) -> None:
        if message == "first":
            is_taken.set()
            end.wait(_TIME_LIMIT_S)
        logged.append(message)

    monkeypatch.setattr(_C, "set_health_log_reader", lambda start: None)
    monkeypatch.setattr(_C, "take_health_record", lambda: messages.pop() if messages else None)
    monkeypatch.setattr(log, "_serve", serve)
    monkeypatch.setattr(log, "_WAIT_S", 0.1)
    log._start_thread()
    assert is_taken.wait(_TIME_LIMIT_S)
    log.stop()
    assert logged == ["second"]
    end.set()


def test_messages_after_an_error_of_a_handler_are_logged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    messages, logged = ["second", "first"], []

    def serve(message: str) -> None:
        if message == "first":
            raise OSError("no space left")
        logged.append(message)

    monkeypatch.setattr(_C, "take_health_record", lambda: messages.pop() if messages else None)
    monkeypatch.setattr(log, "_serve", serve)
    log._work()
    assert logged == ["second"]
    assert "OSError: no space left" in capsys.readouterr().err
