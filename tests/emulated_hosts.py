"""Several hosts on one machine, made of Linux namespaces, for tests of what happens between hosts.

Each host has its own network, processes, host name and ``/etc/hosts``. A bridge connects the hosts.
Root, util-linux and iproute2 are needed.

    with EmulatedHosts(["node-a", "node-b"]) as network:
        results = network.run(["torchrun", ...], limit_s=60)
        network["node-b"].link_down()

The namespaces have no names, so tests that run at the same time cannot collide. The kernel removes
a host's processes and interfaces when the host's first process ends. That process reads from a pipe
of the test process, so it also ends when the test process is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_NEW_NAMESPACES = ["--net", "--pid", "--uts", "--mount", "--ipc"]
_LINKS_OF_NAMESPACES = ["net", "pid", "uts", "mnt", "ipc"]  # in /proc/PID/ns
_SUBNET = "10.231.0"
_SHORT_LIMIT_S = 20.0  # for commands that should take milliseconds


class CannotEmulate(Exception):
    """This machine does not permit namespaces, or lacks a program."""


def enter(first_pid: int) -> None:
    """Moves this process, which must have one thread, into the host with this ``first_pid``.

    Only the processes that this process forks later are processes of the host.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    names = [f"/proc/{first_pid}/ns/{link}" for link in _LINKS_OF_NAMESPACES]
    files = [os.open(name, os.O_RDONLY) for name in names]  # the host has another /proc
    for name, file in zip(names, files, strict=True):
        if libc.setns(file, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
        os.close(file)


class _Namespaces:
    """A set of namespaces and their first process, which does nothing but keep them."""

    def __init__(self, set_up: str) -> None:
        # Ignoring SIGCHLD makes the kernel reap orphans, whose parent the first process becomes.
        script = f"set -e; {set_up}; trap '' CHLD; echo ready; exec cat >/dev/null"
        self._started = [
            subprocess.Popen(
                ["unshare", *_NEW_NAMESPACES, "--fork", "--mount-proc", "sh", "-c", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        ]
        unshare = self._started[0]
        assert unshare.stdout is not None
        if (line := unshare.stdout.readline()) != "ready\n":
            raise RuntimeError(f"{line}{unshare.communicate(timeout=_SHORT_LIMIT_S)[0]}".strip())
        self._namespace = os.readlink(f"/proc/{unshare.pid}/ns/pid_for_children")
        (self.first_pid,) = self.pids()

    def pids(self, states: str = "DRSTZ") -> list[int]:
        """Process IDs, in the test process's numbering, of processes in one of these states."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if os.readlink(folder / "ns" / "pid") == self._namespace and state in states:
                    found.append(int(folder.name))
        return found

    def _enter(self, *namespaces: str) -> list[str]:
        return ["nsenter", f"--target={self.first_pid}", *namespaces]

    def network(self, *command: str) -> None:
        """Runs a short command, such as ``ip``, in this network."""
        words = [*self._enter("--net"), *command]
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SHORT_LIMIT_S)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")

    def kill(self) -> None:
        """Kills all processes and removes the host.

        The kernel closes the host's connections. After ``link_down()``, peers do not see that, as
        when a host loses its power.
        """
        if self._started[0].poll() is None:
            os.kill(self.first_pid, signal.SIGKILL)
            for process in self._started:  # the kernel keeps a host until all of these have ended
                process.send_signal(signal.SIGCONT)
            self._started[0].communicate(timeout=_SHORT_LIMIT_S)


class Host(_Namespaces):
    """One emulated host. Its network interface is ``eth0``."""

    def __init__(self, name: str, index: int, hosts_file: Path, switch: _Namespaces) -> None:
        super().__init__(f"hostname {name}; mount --bind {hosts_file} /etc/hosts")
        self.name, self.address = name, f"{_SUBNET}.{index + 1}"
        self._switch, self._port = switch, f"port{index}"
        peer = ["peer", "name", "eth0", "netns", str(self.first_pid)]
        switch.network("ip", "link", "add", self._port, "type", "veth", *peer)
        switch.network("ip", "link", "set", self._port, "master", "bridge", "up")
        self.network("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        for interface in ("eth0", "lo"):
            self.network("ip", "link", "set", interface, "up")

    def start(
        self,
        command: Sequence[str],
        output: IO[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Starts a command. Signals to the returned process do not reach it; ``kill()`` does."""
        words = [*self._enter(*_NEW_NAMESPACES), "env", f"--chdir={cwd or Path.cwd()}", *command]
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        self._started.append(subprocess.Popen(words, env=env, text=True, **streams))
        return self._started[-1]

    def link_down(self) -> None:
        """Drops all packets from and to this host. Neither side is informed."""
        self._switch.network("ip", "link", "set", self._port, "down")

    def link_up(self) -> None:
        self._switch.network("ip", "link", "set", self._port, "up")

    def limit_rate(self, mbit_per_s: float, queue_s: float = 0.1) -> None:
        """Limits the link's rate in each direction. A packet waits at most ``queue_s`` seconds."""
        rate = ["rate", f"{mbit_per_s}mbit", "burst", "128kb", "latency", f"{queue_s * 1000:.0f}ms"]
        limit = ["root", "tbf", *rate]
        self.network("tc", "qdisc", "replace", "dev", "eth0", *limit)
        self._switch.network("tc", "qdisc", "replace", "dev", self._port, *limit)

    def freeze(self) -> None:
        """Stops all processes. The kernel still acknowledges packets, unless the link is down."""
        deadline = time.monotonic() + _SHORT_LIMIT_S
        # The first process continues, so that it ends with the test process.
        while running := {*self.pids("DRS")} - {self.first_pid}:
            assert time.monotonic() < deadline, f"processes {running} do not stop"
            self._signal(running, signal.SIGSTOP)

    def thaw(self) -> None:
        # nsenter stops itself when its command stops.
        own = [process.pid for process in self._started[1:] if process.poll() is None]
        self._signal({*self.pids("T"), *own}, signal.SIGCONT)

    @staticmethod
    def _signal(pids: set[int], number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class EmulatedHosts:
    """Hosts that reach each other by name. Entering raises CannotEmulate: tests should skip."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._open = contextlib.ExitStack()
        self.hosts: list[Host] = []

    def __enter__(self) -> EmulatedHosts:
        if os.geteuid() != 0:
            raise CannotEmulate("root is needed")
        entries = [f"{_SUBNET}.{index + 1} {name}\n" for index, name in enumerate(self._names)]
        with contextlib.ExitStack() as stack:
            file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "hosts"
            file.write_text("127.0.0.1 localhost\n" + "".join(entries))
            try:
                switch = _Namespaces("true")
                stack.callback(switch.kill)
                switch.network("ip", "link", "add", "bridge", "type", "bridge")
                switch.network("ip", "link", "set", "bridge", "up")
                for index, name in enumerate(self._names):
                    self.hosts.append(Host(name, index, file, switch))
                    stack.callback(self.hosts[-1].kill)
            except (RuntimeError, FileNotFoundError) as error:
                raise CannotEmulate(str(error)) from error
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[self._names.index(name)]

    def run(
        self,
        command: Sequence[str],
        limit_s: float,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> list[subprocess.CompletedProcess[str]]:
        """Runs a command on all hosts at the same time, to its end; stderr is in ``stdout``.

        Raises:
            AssertionError: a host needs longer. The text has all outputs until then.
        """
        deadline = time.monotonic() + limit_s
        with contextlib.ExitStack() as stack:
            # Files, since a pipe that nobody reads would block the command when it is full.
            files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in self.hosts]
            pairs = zip(self.hosts, files, strict=True)
            started = [host.start(command, file, env, cwd) for host, file in pairs]
            while time.monotonic() < deadline and None in [process.poll() for process in started]:
                time.sleep(0.05)
            outputs = [file.seek(0) or file.read() for file in files]
        codes = [process.returncode for process in started]
        assert None not in codes, f"still running after {limit_s} s\n" + "\n".join(outputs)
        ended = zip(codes, outputs, strict=True)
        return [subprocess.CompletedProcess(command, code, output) for code, output in ended]
