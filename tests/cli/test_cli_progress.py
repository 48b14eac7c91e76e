"""Progress bars of steps, which appear only at a terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import time

import pytest
from cli_process import SCRIPTS, environment

from ddpx.cli.progress import step_bar


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "rank"), [(io.StringIO(), "0"), (_Terminal(), "1")], ids=["file", "other rank"]
)
def test_quiet(monkeypatch, stream, rank):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("RANK", rank)
    assert step_bar("training", 3) is None
    assert stream.getvalue() == ""


@pytest.mark.parametrize("total", [3, None])
def test_a_bar_counts_steps(monkeypatch, total):
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    monkeypatch.setattr(sys, "stderr", _Terminal())
    monkeypatch.setenv("RANK", "0")
    advance = step_bar("training", total)
    assert advance is not None
    for _ in range(5):  # also after the last step
        advance()
        time.sleep(0.12)  # a bar is drawn at most ten times a second
    said = sys.stderr.getvalue()
    assert "training" in said
    assert ("2/3" in said) == bool(total) and ("4step" in said) == (not total)
    assert "4/3" not in said


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("words", "titles"),
    [
        (
            ("timeline", "--nproc-per-node=1", "train.py", "--num-steps=6", "--steps=5"),
            ["recording"],
        ),
        pytest.param(
            *(("parity", "train.py", "--num-steps", "3"), ["DDP:", "ReducerDDP:"]),
            marks=pytest.mark.full_only,
        ),
    ],
    ids=["timeline", "parity"],
)
def test_at_a_terminal(tmp_path, words, titles):
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    if words[0] == "timeline":
        words = (*words, "--out", str(tmp_path / "out"))
    ours, theirs = pty.openpty()
    # the terminal has no size yet
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "ddpx", *words],
        cwd=SCRIPTS,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    said = b""
    try:
        while chunk := _read(ours):
            said += chunk
        assert process.wait(timeout=60) == 0, said.decode()
    finally:
        os.close(ours)
        process.kill()
        process.wait()
    for title in titles:
        assert title in said.decode(), said.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the end of the output, on Linux
        return b""
