"""The emulated hosts themselves: what they share, and the effects of link_down, freeze and kill."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import IO

import pytest
from emulated_hosts import CannotEmulate, EmulatedHosts

pytestmark = pytest.mark.timeout(60)
_SEND = """
import socket, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
    for number in range(10_000):
        out.sendto(b"%d" % number, ("node-b", 5000))
        time.sleep(0.02)
"""
_RECEIVE = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as incoming:
    incoming.bind(("", 5000))
    while True:
        print(incoming.recv(100).decode(), flush=True)
"""


@pytest.fixture
def network() -> Iterator[EmulatedHosts]:
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(EmulatedHosts(["node-a", "node-b"]))
        except CannotEmulate as reason:
            pytest.skip(f"hosts cannot be emulated here: {reason}")
        yield hosts


@pytest.fixture
def output() -> Iterator[IO[str]]:
    with tempfile.TemporaryFile("w+") as file:
        yield file


def _grows(file: IO[str], seconds: float = 0.5) -> bool:
    file.flush()
    before = file.seek(0, 2)
    time.sleep(seconds)
    return file.seek(0, 2) > before


def _soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            return False
    return True


def test_hosts_have_names_and_processes_of_their_own(network):
    show = "hostname; getent hosts node-a node-b | wc -l; ls -d /proc/[0-9]* | wc -l; exit 3"
    results = network.run(["sh", "-c", show], limit_s=20)
    assert [result.returncode for result in results] == [3, 3]
    words = [result.stdout.split() for result in results]
    assert [name for name, *_ in words] == ["node-a", "node-b"]
    assert all(known == "2" and int(processes) < 8 for _, known, processes in words), words


def test_link_freeze_and_kill(network, output):
    node_a, node_b = network.hosts
    with open("/dev/null", "w") as nowhere:
        node_b.start([sys.executable, "-c", _RECEIVE], output)
        node_a.start([sys.executable, "-c", _SEND], nowhere)
        assert _soon(lambda: _grows(output, 0.1))
        for interrupt, mend in [
            (node_b.link_down, node_b.link_up),
            (node_a.link_down, node_a.link_up),
            (node_a.freeze, node_a.thaw),
            (node_b.freeze, node_b.thaw),
        ]:
            interrupt()
            # not at once: packets may be queued
            assert _soon(lambda: not _grows(output)), interrupt
            mend()
            assert _soon(lambda: _grows(output, 0.1)), mend
        node_a.kill()
        assert node_a.pids() == []
        assert _soon(lambda: not _grows(output))
    assert node_b.pids()


def test_a_frozen_host_is_removed(output):
    hosts = EmulatedHosts(["node-a"])
    try:
        with hosts:
            process = hosts["node-a"].start(["sleep", "1000"], output)
            hosts["node-a"].freeze()
    except CannotEmulate as reason:
        pytest.skip(f"hosts cannot be emulated here: {reason}")
    assert hosts["node-a"].pids() == []
    assert process.wait(20) != 0


def test_a_slow_command_is_an_error_with_its_output(network):
    with pytest.raises(AssertionError, match=r"still running after 0.5 s\nhello"):
        network.run(["sh", "-c", "echo hello; exec sleep 1000"], limit_s=0.5)


def test_the_rate_is_limited(network):
    """Half a megabyte takes a second at 4 Mbit/s. The first 128 KiB are not limited."""
    send = "import socket; socket.create_server(('', 5001)).accept()[0].sendall(bytes(500_000))"
    fetch = (
        "import socket, time\n"
        "for attempt in range(100):\n"
        "    try:\n"
        "        s = socket.create_connection(('node-a', 5001))\n"
        "        break\n"
        "    except ConnectionRefusedError:\n"
        "        time.sleep(0.1)\n"
        "start = time.monotonic()\n"
        "while s.recv(100_000): pass\n"
        "print(time.monotonic() - start)\n"
    )
    network["node-a"].limit_rate(4)
    python = sys.executable
    program = f'case $(hostname) in node-a) {python} -c "$0";; *) {python} -c "$1";; esac'
    results = network.run(["sh", "-c", program, send, fetch], limit_s=30)
    assert float(results[1].stdout) > 0.5, results
