"""The files of docs/multi_node.md run on two emulated hosts, as far as that is possible."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cli_process
import pytest
import torch
from emulated_hosts import CannotEmulate, EmulatedHosts

ROOT = cli_process.ROOT
FILES = ROOT / "examples" / "multi_node"
HERE = Path(__file__).parent
TRAIN = "examples/multi_node/train.py"
LAUNCH = ["bash", "examples/multi_node/torchrun.sh"]
POD_NAMES = ["ddpx-worker-0", "ddpx-worker-1"]  # names as the operator gives them
LIMIT_S = 240.0  # a run takes about 10 s on two idle cores
pytestmark = pytest.mark.timeout(2 * LIMIT_S)


@pytest.fixture(scope="module")
def network() -> Iterator[EmulatedHosts]:
    """Two hosts for all tests of this file."""
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(EmulatedHosts(POD_NAMES))
        except CannotEmulate as reason:
            pytest.skip(f"hosts cannot be emulated here: {reason}")
        yield hosts


def _environment(first_on_path: Path | None = None, **changes: str) -> dict[str, str]:
    """The variables of a node. ``torchrun`` is that of this Python."""
    env = cli_process.environment(FILES)
    folders = [first_on_path, Path(sys.executable).parent, env["PATH"]]
    env["PATH"] = os.pathsep.join(str(folder) for folder in folders if folder)
    return {**env, **changes}


def _run(network: EmulatedHosts, command: list[str], env: dict[str, str]) -> str:
    """Runs a command on both hosts. Returns both outputs."""
    results = network.run(command, LIMIT_S, env, ROOT)
    text = "\n".join(result.stdout for result in results)
    assert [result.returncode for result in results] == [0, 0], text
    return text


def test_torchrun_on_two_hosts_trains_as_ddp(network, tmp_path):
    env = _environment(HEAD_NODE=POD_NAMES[0], RANKS_PER_NODE="2", GLOO_SOCKET_IFNAME="eth0")
    _run(network, [*LAUNCH, str(HERE / "compare.py"), str(tmp_path)], env)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(4)]
    assert {rank["node"] for rank in ranks} == set(POD_NAMES)
    for rank in ranks:
        assert rank["hosts"] == [[0, 1], [2, 3]]
        weights = rank["weights"]
        ddp = weights["DDP over gloo"]
        assert torch.equal(weights["ReducerDDP over gloo"], ddp)
        over_shm = weights["ReducerDDP over shm"]
        torch.testing.assert_close(over_shm, ddp, rtol=1e-4, atol=1e-5)
        assert torch.equal(over_shm, ranks[0]["weights"]["ReducerDDP over shm"])
        assert torch.equal(over_shm, weights["ReducerDDP with shm"])


@pytest.mark.full_only
@pytest.mark.parametrize(
    ("launcher", "backend", "transport"),
    [
        pytest.param("torchrun", "gloo", "auto", id="torchrun"),
        pytest.param(f"{sys.executable} -m ddpx run", "shm", "auto", id="ddpx run"),
        pytest.param(f"{sys.executable} -m ddpx run", "gloo", "shm", id="ddpx run with shm"),
    ],
)
def test_restart_from_the_checkpoint(network, launcher, backend, transport, tmp_path):
    env = _environment(
        HEAD_NODE=POD_NAMES[0],
        RANKS_PER_NODE="2",
        LAUNCHER=launcher,
        DDPX_TRANSPORT=transport,
    )
    arguments = [f"--checkpoint={tmp_path / 'run.pt'}", f"--backend={backend}", "--steps=200"]
    text = _run(network, [*LAUNCH, str(HERE / "killed_once.py"), TRAIN, *arguments], env)
    assert "RankFailure" in text and "rank 3" in text, text
    stays_on_gloo = "averaged over gloo, because the ranks are on 2 hosts" in text
    assert stays_on_gloo == (backend == "gloo" and transport == "auto"), text
    for rank in range(4):
        assert f"rank {rank} resumes at step " in text, text
    assert "the same weights on 4 ranks of 2 nodes" in text, text


def _write_program(path: Path, text: str) -> None:
    path.write_text("#!/usr/bin/env bash\nset -eu\n" + text)
    path.chmod(0o755)


def _submit(folder: Path, *arguments: str) -> dict[str, str]:
    """Runs job.sbatch as Slurm would, with an srun that saves its variables and its command.

    Returns:
        The variables of srun's tasks. ``COMMAND`` has the words of the command, one per line.
    """
    _write_program(
        folder / "scontrol",
        f'[ "$*" = "show hostnames ddpx-worker-[0-1]" ]\nprintf "%s\\n" {" ".join(POD_NAMES)}\n',
    )
    _write_program(
        folder / "srun",
        f'export COMMAND="$(printf "%s\\n" "$@")"\nenv -0 >"{folder}/variables"\n',
    )
    env = _environment(
        folder,
        SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_JOB_NODELIST="ddpx-worker-[0-1]",
        SLURM_JOB_ID="71234",
        SLURM_CPUS_PER_TASK="2",
    )
    subprocess.run(
        ["bash", FILES / "job.sbatch", *arguments], env=env, cwd=folder, timeout=20, check=True
    )
    pairs = (folder / "variables").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if pair)


def _srun_command(variables: dict[str, str]) -> list[str]:
    words = variables["COMMAND"].splitlines()
    return words[next(i for i, word in enumerate(words) if not word.startswith("--")) :]


@pytest.mark.parametrize("name", ["torchrun.sh", "job.sbatch"])
def test_scripts_are_valid_bash(name):
    subprocess.run(["bash", "-n", FILES / name], check=True, timeout=20)


def test_job_of_slurm_starts_torchrun_on_each_node(tmp_path):
    variables = _submit(tmp_path, "--steps=7")
    _write_program(tmp_path / "torchrun", 'printf "%s\\n" "$@"')
    done = subprocess.run(
        _srun_command(variables),
        env=variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "--nnodes=2",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=ddpx-worker-0:29634",
        "--rdzv-id=71234",
        "--max-restarts=3",
        TRAIN,
        "--steps=7",
    ]


@pytest.mark.full_only
def test_job_of_slurm_trains(network, tmp_path):
    checkpoint = tmp_path / "run.pt"
    variables = _submit(tmp_path, f"--checkpoint={checkpoint}", "--backend=shm")
    text = _run(network, _srun_command(variables), variables)
    assert "shm on cpu, nodes of ranks: " in text, text
    assert "OK: 30 steps" in text and "on 4 ranks of 2 nodes" in text, text
    assert torch.load(checkpoint)["step"] == 30


def _pytorchjob() -> Any:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return yaml.safe_load((FILES / "pytorchjob.yaml").read_text())


def _container() -> Any:
    template = _pytorchjob()["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    (container,) = template["spec"]["containers"]
    return container


def _keys(value: Any, path: str = "") -> set[str]:
    """The paths of all fields. An element of a list has the path of its list."""
    if isinstance(value, list):
        return {key for element in value for key in _keys(element, path)}
    if isinstance(value, dict):
        below = [{f"{path}.{key}"} | _keys(field, f"{path}.{key}") for key, field in value.items()]
        return {key for keys in below for key in keys}
    return set()


def test_pytorchjob_has_the_fields_of_its_schema():
    """All fields of the file exist in the operator's v1 types and in Kubernetes' PodSpec."""
    job = _pytorchjob()
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]
    policy = {"rdzvBackend", "rdzvPort", "rdzvId", "minReplicas", "maxReplicas", "maxRestarts"}
    assert set(spec) == {"elasticPolicy", "runPolicy", "pytorchReplicaSpecs"}
    assert set(spec["elasticPolicy"]) == policy
    assert set(spec["runPolicy"]) == {"cleanPodPolicy", "activeDeadlineSeconds"}
    assert set(spec["pytorchReplicaSpecs"]) == {"Worker"}
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    assert set(worker) == {"replicas", "restartPolicy", "template"}
    assert worker["restartPolicy"] in {"Always", "OnFailure", "Never", "ExitCode"}
    assert spec["elasticPolicy"]["maxReplicas"] == worker["replicas"] == 2
    assert _keys(worker["template"]["spec"]) == {
        ".containers",
        *(f".containers.{key}" for key in ("name", "image", "workingDir", "command", "env")),
        *(f".containers.{key}" for key in ("env.name", "env.value", "resources", "volumeMounts")),
        *(f".containers.resources.{key}" for key in ("requests", "limits")),
        *(f".containers.resources.requests.{key}" for key in ("cpu", "memory")),
        ".containers.resources.limits.memory",
        *(f".containers.volumeMounts.{key}" for key in ("name", "mountPath")),
        ".volumes",
        *(f".volumes.{key}" for key in ("name", "persistentVolumeClaim")),
        ".volumes.persistentVolumeClaim.claimName",
    }
    assert _container()["name"] == "pytorch"
    assert all(isinstance(entry["value"], str) for entry in _container()["env"])


@pytest.mark.full_only
def test_pods_of_the_pytorchjob_train(network, tmp_path):
    """Runs the container's command, with the variables that the operator derives from the elastic
    policy."""
    job, container = _pytorchjob(), _container()
    policy = job["spec"]["elasticPolicy"]
    env = _environment(
        **{entry["name"]: entry["value"] for entry in container["env"]},
        PET_RDZV_ENDPOINT=f"{job['metadata']['name']}-worker-0:{policy['rdzvPort']}",
        PET_RDZV_BACKEND=policy["rdzvBackend"],
        PET_RDZV_ID=policy["rdzvId"],
        PET_NNODES=f"{policy['minReplicas']}:{policy['maxReplicas']}",
        PET_MAX_RESTARTS=str(policy["maxRestarts"]),
        PYTHONUNBUFFERED="0",
    )
    command = [word.replace("/shared", str(tmp_path)) for word in container["command"]]
    text = _run(network, command, env)
    assert "shm on cpu, nodes of ranks: " in text, text
    assert "OK: 30 steps" in text and "on 4 ranks of 2 nodes" in text, text


@pytest.mark.full_only
def test_ray_trains_on_two_workers(tmp_path):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed; `make setup` installs it")
    script = FILES / "ray_train.py"
    done = cli_process.run("--storage", tmp_path, cwd=tmp_path, start=(str(script),), limit_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OK: 30 steps" in done.stdout, done.stdout
    assert "the same weights on 2 workers over shm" in done.stdout, done.stdout
