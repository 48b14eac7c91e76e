"""Invalid usage of every command: exit code 2 and one line with the reason."""

import os
import shutil
import subprocess
import sys

import click
import pytest
from cli_process import ROOT, SCRIPTS, assert_code, environment, run

from ddpx.cli.group import run_command_line

_TRAIN = str(SCRIPTS / "train.py")
_MISTAKES = {
    "nothing.py": "No such command 'nothing.py'",
    "run nothing.py": "there is no script 'nothing.py'",
    "run --bogus=3 nothing.py": "unrecognized arguments: --bogus=3",
    "run -m not.there": "there is no module 'not.there'",
    "run --no-python nothing.py": "--no-python and --run-path",
    f"run --nproc-per-node=two {_TRAIN}": "Unsupported nproc_per_node value: two",
    f"run --nproc-per-node=0 {_TRAIN}": "--nproc-per-node=0 is not a positive number of ranks",
    f"run --nnodes=x {_TRAIN}": "torchrun cannot start",
    f"run --bucket-cap-mb=many {_TRAIN}": "--bucket-cap-mb='many' is not a bucket size",
    "run": "give a script: ddpx run train.py",
    "run --nproc-per-node=2": "give a script: ddpx run train.py",
    "parity": "Missing argument",
    "parity nothing.py": "there is no script 'nothing.py'",
    "parity --bogus nothing.py": "No such option",
    f"parity --steps=0 {_TRAIN}": "--steps",
    f"parity --backend=shm {_TRAIN}": "--backend and --set are only for MODULE:FUNCTION",
    "parity not_there:build": "there is no module 'not_there'",
    "parity models_to_build:nothing": "has no function or class 'nothing'",
    "parity models_to_build:": "not of the form module:function",
    "parity models_to_build:raises": "raised RuntimeError: no weights to be found",
    "parity models_to_build:exits": "models_to_build:exits raised SystemExit: 0",
    "parity models_to_build:without_input": "returned no example input",
    "parity models_to_build:mlp --set bogus=1": "'bogus=1' is not NAME=VALUE",
    "parity models_to_build:mlp --set static_graph": "'static_graph' is not NAME=VALUE",
    "parity models_to_build:mlp --set average=1": "is not NAME=VALUE with the name of an argument",
    "parity models_to_build:mlp --set static_graph=maybe": "'maybe' is not a number, a",
    "parity models_to_build:mlp --set device_ids={0}": "'{0}' is not a number, a string",
    "parity models_to_build:mlp --lr 3": "MODULE:FUNCTION takes no arguments, but got: --lr 3.",
    "timeline nothing.py": "there is no script 'nothing.py'",
    f"timeline --steps=x {_TRAIN}": "'x' is not a valid integer",
    f"timeline --out=/dev/null/a {_TRAIN}": "cannot write into the folder '/dev/null/a': Not",
    f"timeline --launches=0 {_TRAIN}": "--launches",
    "timeline show nothing.json": "there is no file or folder 'nothing.json'",
    f"timeline show {_TRAIN}": "holds no usable timeline of ddpx",
    "timeline show --bogus x.json": "No such option",
    "buckets": "Missing argument",
    "buckets models_to_build": "not of the form module:function",
    "buckets ./models_to_build:mlp": "there is no module './models_to_build'",
    "buckets exits_at_import:mlp": "exits_at_import raised SystemExit: 3",
    "buckets models_to_build:not_a_module": "returned an object of type int",
    "buckets models_to_build:frozen": "doesn't have any parameter that requires a gradient",
    "buckets models_to_build:mlp --bucket-cap-mb=nan": "is not a bucket size",
    "buckets models_to_build:mlp --bucket-cap-mb-list=1,x": "'1,x' is not a list of numbers",
    "buckets models_to_build:mlp --plot=/dev/null/a.png": "cannot write into the folder",
    "buckets models_to_build:mlp --plot=plot.bogus": "bogus",
    "buckets models_to_build:not_a_module --plot=": "an empty text is no path of a file",
    "buckets models_to_build:not_a_module --plot=plot": "plot has no suffix of a picture",
    f"plan --out= {_TRAIN}": "an empty text is no path of a file",
    f"plan --plot= {_TRAIN}": "an empty text is no path of a file",
    f"plan --out=/dev/null/a.json {_TRAIN}": "cannot write into the folder '/dev/null': Not",
    "plan nothing.py": "there is no script 'nothing.py'",
    f"plan --out=./a.svg --plot=a.svg {_TRAIN}": "--out and --plot name the same file",
    f"plan --plot=plan.txt {_TRAIN}": "plan.txt has no suffix of a picture",
    f"plan --nproc-per-node=1 {_TRAIN}": "--nproc-per-node",
    "info --bogus": "No such option",
}


@pytest.mark.parametrize("words", _MISTAKES)
def test_mistake_is_told_in_one_line(words, capsys, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.chdir(tmp_path)
    assert run_command_line(words.split()) == 2
    told = capsys.readouterr().err
    assert told.startswith("ddpx: ") and told.count("\n") == 1, told
    assert _MISTAKES[words] in told


def test_a_mistake_with_click_8_1(capsys, monkeypatch):
    """This click has no error of its own for a command without arguments."""
    monkeypatch.delattr(click.exceptions, "NoArgsIsHelpError", raising=False)
    assert run_command_line(["run", "nothing.py"]) == 2
    assert capsys.readouterr().err.startswith("ddpx: there is no script 'nothing.py'")


@pytest.mark.parametrize("words", [[], ["timeline"]])
def test_without_arguments_the_help_is_shown(words, capsys):
    help_is_error = hasattr(click.exceptions, "NoArgsIsHelpError")
    assert run_command_line(words) == (2 if help_is_error else 0)
    assert capsys.readouterr().out.startswith(f"Usage: {' '.join(['ddpx', *words])} [OPTIONS]")


@pytest.mark.parametrize("command", ["plan --out", "plan --plot", "buckets --plot"])
def test_a_file_that_cannot_be_written(command, capsys, monkeypatch, tmp_path):
    (tmp_path / "old.svg").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)
    assert run_command_line([*command.split(), "old.svg", _TRAIN]) == 2
    assert "cannot write the file 'old.svg': permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "timeline", "parity"])
@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("DDPX_STALL_WARN", "soon", "DDPX_STALL_WARN='soon' is not a valid time limit. Pass a"),
        ("DDPX_STALL_ERROR", "1", "The stall error (after 1 s) would come before its warning"),
        ("DDPX_TRANSPORT", "tcp", "DDPX_TRANSPORT='tcp' is not a transport. Pass 'auto'"),
        ("DDPX_BUCKET_PLAN", "no.json", "DDPX_BUCKET_PLAN='no.json' is not the path of a bucket"),
        ("DDPX_BUCKET_PLAN", _TRAIN, f"{_TRAIN} is no bucket plan (JSONDecodeError: "),
        ("DDPX_BUCKET_CAP_MB", "-2", "DDPX_BUCKET_CAP_MB='-2' is not a bucket size"),
        ("DDPX_BUCKET_CAP_MB", "inf", "DDPX_BUCKET_CAP_MB='inf' is not a bucket size"),
        ("DDPX_HEALTH", "yes", "DDPX_HEALTH=yes is neither on nor off. Set DDPX_HEALTH to 1"),
    ],
)
def test_wrong_variable_is_told_before_ranks_start(
    command, variable, value, reason, capfd, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDPX_STALL_WARN", "10")
    monkeypatch.setenv(variable, value)
    assert run_command_line([command, _TRAIN]) == 2
    told = capfd.readouterr().err.splitlines()
    assert told[-1].startswith(f"ddpx: {reason}") and len(told) == 1 + (command == "parity")


@pytest.mark.parametrize(
    "start", [("-m", "ddpx"), pytest.param(("bin/ddpx",), marks=pytest.mark.full_only)]
)
def test_without_the_extension_one_line_says_how_to_build(tmp_path, start):
    shutil.copytree(ROOT / "ddpx", tmp_path / "ddpx", ignore=shutil.ignore_patterns("*.so"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ddpx").write_text("from ddpx.cli import main\nmain()\n")
    done = subprocess.run(
        [sys.executable, *start, "info"],
        cwd=tmp_path,
        env={**environment(), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert_code(done, 2)
    assert done.stderr.count("\n") == 1 and "In a checkout, run: make build." in done.stderr


@pytest.mark.parametrize(
    "command", ["run", "parity", "timeline", "timeline show", "buckets", "info"]
)
def test_help_has_examples(command, capsys):
    assert run_command_line([*command.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert "Examples:" in said and f"ddpx {command}" in said.partition("Examples:")[2]


def test_exit_code_leaves_the_process():
    assert_code(run("run", "nothing.py"), 2)


def test_without_click_one_line_says_what_to_install(tmp_path):
    (tmp_path / "click.py").write_text("raise ImportError('hidden for a test')")
    done = subprocess.run(
        [sys.executable, "-m", "ddpx", "info"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert_code(done, 2)
    assert done.stderr.count("\n") == 1 and "pip install click" in done.stderr
