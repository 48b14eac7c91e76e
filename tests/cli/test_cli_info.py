"""``ddpx info``: facts for a bug report."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cli_process import assert_code, run
from nccl_classes import BACKENDS, COUNTING

import ddpx
from ddpx.cli import info
from ddpx.cli.group import run_command_line
from ddpx.cli.info import gather


def test_json_has_all_sections(monkeypatch):
    monkeypatch.setenv("DDPX_SHM_ORDER", "gloo")
    done = run("info", "--json")
    assert_code(done, 0)
    facts = json.loads(done.stdout)
    assert list(facts) == ["versions", "build", "machine", "communication", "environment"]
    assert facts["versions"]["ddpx"] == ddpx.__version__
    assert facts["versions"]["torch"] == torch.__version__
    assert "gloo yes" in facts["communication"]["backends"]
    assert "shm yes" in facts["communication"]["backends"]
    assert facts["communication"]["shared memory"] == "yes: two test processes shared memory"
    assert facts["communication"]["buckets over gloo"] == "shm, with gloo's bits"
    assert facts["communication"]["on several hosts"].startswith("gloo, for DDP's bits")
    assert facts["environment"]["DDPX_SHM_ORDER"] == "gloo"
    has_cuda = torch.version.cuda is not None
    assert has_cuda or (facts["communication"]["NCCL"], facts["build"]["CUDA of torch"]) == (
        "none",
        "none",
    )


def test_the_transport_may_be_switched_off(monkeypatch):
    monkeypatch.setenv("DDPX_TRANSPORT", "group")
    facts = gather(probe=False)["communication"]
    assert facts["buckets over gloo"] == "gloo (DDPX_TRANSPORT=group)"
    assert facts["on several hosts"] == "gloo (DDPX_TRANSPORT=group)"


def test_the_transport_between_hosts_may_be_switched_on(monkeypatch):
    monkeypatch.setenv("DDPX_TRANSPORT", "shm")
    facts = gather()["communication"]
    assert facts["buckets over gloo"] == "shm, with gloo's bits"
    assert facts["on several hosts"] == "shm within hosts, with other bits than gloo's"


def test_sums_in_the_order_of_ranks_have_other_bits(monkeypatch):
    monkeypatch.setenv("DDPX_SHM_ORDER", "fixed")
    assert gather()["communication"]["buckets over gloo"] == "shm, with other bits than gloo's"


@pytest.mark.parametrize("name", ["DDPX_TRANSPORT", "DDPX_SHM_ORDER"])
def test_a_wrong_variable_is_an_error_for_wrappers(monkeypatch, capfd, name):
    monkeypatch.setenv(name, "wrong")
    facts = gather()["communication"]
    for key in ("buckets over gloo", "on several hosts"):
        assert facts[key].startswith("an error: ")
        assert "'wrong'" in facts[key] and name in facts[key]
    assert "Traceback" not in capfd.readouterr().err  # of the test processes


@pytest.mark.parametrize(
    ("choice", "said"), [("auto", "gloo (TORCH_DISTRIBUTED_DEBUG=DETAIL)"), ("shm", "an error")]
)
def test_details_of_torch_keep_the_group(monkeypatch, choice, said):
    monkeypatch.setenv("DDPX_TRANSPORT", choice)
    monkeypatch.setattr(dist, "get_debug_level", lambda: dist.DebugLevel.DETAIL)
    assert gather(probe=False)["communication"]["buckets over gloo"] == said


@pytest.mark.parametrize(("choice", "said"), [("auto", "gloo, because"), ("shm", "an error")])
def test_processes_that_share_no_memory(monkeypatch, choice, said):
    monkeypatch.setenv("DDPX_TRANSPORT", choice)
    monkeypatch.setattr(info, "_shared_memory", lambda: "no: a cause")
    assert gather()["communication"]["buckets over gloo"].startswith(said)


def test_text_is_the_same_to_read(capsys):
    assert run_command_line(["info", "--no-probe"]) == 0
    said = capsys.readouterr().out
    assert f"torch              {torch.__version__}" in said
    assert "shared memory      not tested" in said


def _entry_points(*names: str):
    return lambda group: [SimpleNamespace(name=name) for name in names]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ([], "over gloo, shm, nccl"),
        (["gloo", "nccl2", "nccl-legacy"], "over gloo, shm, nccl, nccl-legacy, nccl2"),
        (["nccl2", "nccl-lazy"], "over gloo, shm, nccl, nccl2; not over nccl-lazy, for lack of"),
        (["nccl", "nccl4py"], "over gloo, shm, nccl; not over nccl4py, for lack of"),
        (["nccl-next"], "over gloo, shm, nccl; not over nccl-next, for lack of"),
    ],
)
def test_the_backends_whose_calls_are_counted(monkeypatch, names, told):
    monkeypatch.setattr("ddpx.cli.info.entry_points", _entry_points(*names))
    assert gather(probe=False)["communication"]["counted calls"].startswith(told)


def test_these_are_the_backends_that_the_core_counts(monkeypatch):
    """tests/devices/test_nccl_names.py compares this list with the core."""
    names = {name for name in BACKENDS if " " not in name}
    monkeypatch.setattr("ddpx.cli.info.entry_points", _entry_points(*names))
    told = gather(probe=False)["communication"]["counted calls"]
    counted, _, others = told.partition("; not over ")
    assert set(counted.removeprefix("over gloo, shm, ").split(", ")) == names & set(COUNTING)
    assert set(others.partition(", for lack")[0].split(", ")) == names - set(COUNTING)


def _smi(folder, script: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


@pytest.mark.parametrize(
    ("script", "driver"),
    [
        ("echo 570.86.15; echo 570.86.15", "570.86.15"),
        ("echo 'NVIDIA-SMI has failed'; exit 9", "none"),
        ("exit 0", "none"),
        (None, "none"),
    ],
)
def test_driver(tmp_path, monkeypatch, script, driver):
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        _smi(tmp_path, script)
    assert gather(probe=False)["machine"]["driver"] == driver


def test_nccl(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    assert gather(probe=False)["communication"]["NCCL"] == "2.27.3"
