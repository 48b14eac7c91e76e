"""``ddpx run``: ReducerDDP does the work, whatever name a script uses for DDP."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from cli_process import ROOT, SCRIPTS, assert_code, environment, run, start
from torch.multiprocessing import ProcessRaisedException

from ddpx.cli.group import run_command_line
from ddpx.cli.runner import _may_have_wrapped_elsewhere
from ddpx.cli.script import Script
from ddpx.cli.torchrun import local_options, torchrun_options


@pytest.mark.timeout(200)
def test_ddp_is_replaced_wherever_it_is_imported_from():
    done = run("run", "five_imports.py", "--lr", "0.1", "--help")
    assert_code(done, 0)
    *lines, last = done.stdout.splitlines()
    names = ["name", "module of DDP", "attribute", "deep attribute", "module", "library", "derived"]
    assert lines == [f"{name}: ddpx.reducer.reducer.Reducer" for name in names]
    assert last == "main: __main__, arguments: ['--lr', '0.1', '--help'], ranks: 2"


def test_ddp_is_replaced_where_it_was_imported_before(tmp_path):
    """Replaced in libraries and in torch's own modules, and nowhere else."""
    done = run(tmp_path / "store", start=("patch_late.py",))
    assert_code(done, 0)
    assert "TooEarly was derived from torch's DistributedDataParallel before" in done.stdout


def test_module_with_arguments_starts_as_python_starts_it():
    """With torchrun's options. A script without DDP gets a hint."""
    done = run("run", "--nproc-per-node=1", "-m", "says_where", "-m", "x")
    assert_code(done, 0)
    assert "name __main__, argv ['says_where.py', '-m', 'x']" in done.stdout
    assert f"path starts with {SCRIPTS.name}, ranks 1" in done.stdout
    assert "wrapped no model in DistributedDataParallel" in done.stderr


@pytest.mark.full_only
def test_script_sees_its_own_folder_and_arguments(tmp_path):
    done = run("run", SCRIPTS / "says_where.py", "-m", "x", cwd=tmp_path)
    assert_code(done, 0)
    assert "name __main__, argv ['says_where.py', '-m', 'x']" in done.stdout
    assert f"path starts with {SCRIPTS.name}, ranks 2" in done.stdout


@pytest.mark.parametrize("is_safe", [False, True])
def test_the_folder_of_a_script_is_not_in_a_safe_path(tmp_path, monkeypatch, is_safe):
    """``python -P`` and PYTHONSAFEPATH, which are new in Python 3.11."""
    (tmp_path / "script.py").write_text("import sys; sys.argv.append(sys.path[0])")
    monkeypatch.setattr(sys, "flags", SimpleNamespace(safe_path=is_safe))
    monkeypatch.setattr(sys, "path", ["first", *sys.path])
    monkeypatch.setattr(sys, "argv", [])
    Script(str(tmp_path / "script.py"), False, ("x",)).run()
    assert sys.argv[1:] == ["x", "first" if is_safe else str(tmp_path)]


@pytest.mark.parametrize(
    ("num_ranks", "given", "threads"),
    [
        (2, None, "1"),
        pytest.param(2, "3", "3", marks=pytest.mark.full_only),
        pytest.param(1, None, "None", marks=pytest.mark.full_only),
    ],
)
def test_ranks_get_one_thread_as_under_torchrun(monkeypatch, capfd, num_ranks, given, threads):
    """Without torchrun's banner."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = str(SCRIPTS / "says_where.py")
    assert run_command_line(["run", f"--nproc-per-node={num_ranks}", script]) == 0
    told = capfd.readouterr()
    assert f"threads {threads}\n" in told.out
    assert "OMP_NUM_THREADS" not in told.err


@pytest.mark.parametrize(
    ("options", "expected"),
    [((), "True"), pytest.param(("--max-restarts=1",), "False", marks=pytest.mark.full_only)],
)
def test_launcher_serves_the_store_unless_ranks_may_restart(options, expected):
    done = run("run", "--nproc-per-node=1", *options, "says_where.py")
    assert_code(done, 0)
    assert f"launcher serves the store: {expected}" in done.stdout


@pytest.mark.parametrize(
    ("variables", "words", "expected"),
    [
        ({}, [], ("2", True)),
        ({}, ["--nnodes=2"], ("1", False)),
        ({}, ["--nnodes=1:1"], ("2", True)),
        ({}, ["--rdzv-endpoint=host0:1234"], ("2", False)),
        ({}, ["--rdzv-backend=c10d"], ("2", False)),
        ({}, ["--master-port=1234"], ("2", False)),
        ({}, ["--master-addr=host0"], ("2", False)),
        ({"PET_NPROC_PER_NODE": "4"}, [], ("4", True)),
        ({"PET_NNODES": "2"}, [], ("1", False)),
    ],
)
def test_defaults_of_ranks_and_of_their_meeting_place(monkeypatch, variables, words, expected):
    """Ranks meet at a free port, unless the user names a place or several nodes."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options, _ = torchrun_options([*words, str(SCRIPTS / "waits.py")])
    assert (options.nproc_per_node, options.standalone) == expected


def test_commands_of_one_machine_ignore_the_nodes_of_a_job(monkeypatch):
    """Launchers of several nodes set torchrun's variables in each container."""
    plain = local_options(3)
    variables = {"NNODES": "2", "NPROC_PER_NODE": "8", "MAX_RESTARTS": "3", "NO_PYTHON": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(f"PET_{name}", value)
    assert local_options(3) == plain
    assert plain.nproc_per_node == "3" and plain.nnodes == "1" and plain.standalone


def test_failed_rank_is_named():
    done = run("run", "fails.py")
    assert_code(done, 1)
    assert "ddpx: rank 1 failed with exit code 3" in done.stderr


@pytest.mark.parametrize(
    ("script", "hint"),
    [
        pytest.param("succeeds", True, marks=pytest.mark.full_only),
        ("fails", True),
        pytest.param("itself", False, marks=pytest.mark.full_only),
    ],
)
def test_script_that_starts_processes_gets_a_hint(script, hint):
    """Also if such a process fails, but not if the script fails by itself."""
    done = run("run", "--nproc-per-node=1", "spawns.py", script)
    assert done.returncode == (0 if script == "succeeds" else 1), done.stderr
    assert ("processes that the script starts by itself, e.g. with mp.spawn" in done.stderr) == hint


@pytest.mark.parametrize(
    ("error", "rank", "hint"),
    [
        (None, "0", True),
        (None, "1", False),
        (SystemExit(0), "0", True),
        (SystemExit(2), "0", False),
        (ValueError(), "0", False),
        (ProcessRaisedException("failed", 0, 17), "1", True),
    ],
)
def test_hint_of_one_rank(monkeypatch, error, rank, hint):
    monkeypatch.setenv("RANK", rank)
    assert _may_have_wrapped_elsewhere(error) == hint


@pytest.mark.parametrize(
    "words",
    [
        ["waits.py"],
        pytest.param(["trains_on.py"], marks=pytest.mark.full_only),
        pytest.param(["--keep-survivors", "waits.py"], marks=pytest.mark.full_only),
    ],
)
def test_interrupt_ends_all_ranks(words):
    process = start("run", *words)
    try:
        ranks = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.terminate()
    assert process.returncode == 128 + signal.SIGINT, told
    assert told.splitlines()[-1] == "ddpx: interrupted"
    assert "Traceback" not in told, told
    deadline = time.monotonic() + 10
    while any(_is_alive(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_is_alive(pid) for pid in ranks)


def test_interrupt_while_ranks_import_torch(tmp_path):
    """A torch that takes a minute to import stands in for the real one."""
    (tmp_path / "torch.py").write_text(_SLOW_TORCH)
    process = subprocess.Popen(
        [sys.executable, ROOT / "ddpx" / "cli" / "rank.py", "ddpx.cli.runner", "waits.py"],
        cwd=SCRIPTS,
        env=environment(tmp_path),
        # A background job of a shell ignores SIGINT, and so would its descendants.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert told == ""


_SLOW_TORCH = """
import time
print("importing", flush=True)
time.sleep(60)
"""


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
