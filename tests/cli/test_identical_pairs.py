"""Twenty pairs of real recordings of one script: at most one false verdict."""

import re
import shutil
import subprocess
import sys

import pytest
from cli_process import ROOT, environment

pytestmark = pytest.mark.timeout(3600)


@pytest.mark.alone
@pytest.mark.full_only
def test_twenty_pairs(tmp_path):
    page = tmp_path / "timeline.md"
    shutil.copy(ROOT / "docs" / "timeline.md", page)
    script = ROOT / "scripts" / "identical_pairs.py"
    done = subprocess.run(
        [sys.executable, script, "--slow", "2", "--folder", tmp_path, "--page", page],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = page.read_text().partition("<!-- pairs: begin -->")[2]
    assert re.search(r"\| identical scripts, 3 launches each *\| *20 \|", table)
