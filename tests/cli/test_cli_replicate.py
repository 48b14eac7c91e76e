"""Commands with a script that calls ddpx.replicate()."""

from __future__ import annotations

import pytest
from cli_process import assert_code, run

from ddpx.timeline import Timeline

pytestmark = pytest.mark.timeout(200)


def test_timeline(tmp_path):
    """The recording has all steps, and the command finds the model."""
    out = tmp_path / "out"
    done = run("timeline", "replicated.py", "--steps", 4, "--out", out)
    assert_code(done, 0)
    assert "wrapped no model" not in done.stdout + done.stderr
    assert [step.number for step in Timeline.load(out / "trace.json").steps] == [0, 1, 2, 3]
