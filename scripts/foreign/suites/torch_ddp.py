"""torch's own tests of DDP, by `make peer-test`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

from outcomes import Outcome
from verdicts import excused_tests

from foreign import BUILD, ROOT
from foreign.environments import Environment
from foreign.suite import Outcomes, Suite


def _run(_: Environment, contestant: str) -> Outcomes:
    file = BUILD / f"peer-{contestant}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "scripts" / "peer_test.py"), "--class", contestant]
    with file.with_suffix(".log").open("w") as log:
        done = subprocess.run([*command, "--json", str(file)], stdout=log, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"peer_test.py exited with {done.returncode}")
    return {
        f"distributed_test::{line['test']}": Outcome(**line[contestant])
        for line in json.loads(file.read_text())
    }


def _reasons() -> Mapping[str, str]:
    excused = excused_tests(ROOT / "docs" / "divergences.md")
    return {f"distributed_test::{name}": reason for name, reason in excused.items()}


SUITE = Suite("torch-ddp", None, _run, _reasons())
