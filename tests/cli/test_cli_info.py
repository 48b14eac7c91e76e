"""``ddpx info``: facts for a bug report."""

import json

import torch
from cli_process import assert_code, run

import ddpx
from ddpx.cli.group import run_command_line


def test_json_has_all_sections(monkeypatch):
    monkeypatch.setenv("DDPX_SHM_ORDER", "fixed")
    done = run("info", "--json")
    assert_code(done, 0)
    facts = json.loads(done.stdout)
    assert list(facts) == ["versions", "build", "machine", "communication", "environment"]
    assert facts["versions"]["ddpx"] == ddpx.__version__
    assert facts["versions"]["torch"] == torch.__version__
    assert "gloo yes" in facts["communication"]["backends"]
    assert "shm yes" in facts["communication"]["backends"]
    assert facts["communication"]["shared memory"] == "yes: two processes shared memory"
    assert facts["environment"]["DDPX_SHM_ORDER"] == "fixed"


def test_text_is_the_same_to_read(capsys):
    assert run_command_line(["info", "--no-probe"]) == 0
    said = capsys.readouterr().out
    assert f"torch              {torch.__version__}" in said
    assert "shared memory      not tried" in said
