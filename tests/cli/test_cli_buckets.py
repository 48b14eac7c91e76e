"""``ddpx buckets`` shows the buckets of ReducerDDP."""

import os
import re

import pytest
from cli_process import SCRIPTS, assert_code, run

from ddpx.cli.group import run_command_line
from ddpx.planning import BucketPlan

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")


@pytest.fixture(autouse=True)
def _models_are_found(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)


def _rows(text: str) -> list[list[str]]:
    """The rows of all tables, without headers."""
    return [line.split() for line in text.splitlines() if line[:1].isdigit() and "MiB" not in line]


def test_first_and_rebuilt_buckets(capsys):
    assert run_command_line(["buckets", "models_to_build:mlp", "--bucket-cap-mb", "1"]) == 0
    said = capsys.readouterr().out
    assert _rows(said) == [
        ["0", "6", "4.52", "0.weight", "3.bias"],  # one bucket until the order is known
        # full at the param with which the bucket reaches 1 MiB
        ["0", "4", "4.01", "3.bias", "2.weight"],
        ["1", "2", "0.51", "0.bias", "0.weight"],
    ]
    assert "assumes that\ngradients arrive in reverse order of registration. " in said


def test_unused_params_keep_the_first_buckets(capsys):
    words = ["buckets", "models_to_build:mlp", "--find-unused-parameters", "--bucket-cap-mb", "1"]
    assert run_command_line(words) == 0
    said = capsys.readouterr().out
    assert "buckets of all steps" in said and "rebuilt" not in said
    assert sum(int(row[1]) for row in _rows(said)) == 6 and len(_rows(said)) == 2


def test_several_caps_side_by_side_and_as_a_picture(tmp_path):
    picture = tmp_path / "buckets.png"
    caps = ("--bucket-cap-mb", 25, "--bucket-cap-mb", 1, "--bucket-cap-mb-list", "0.1,2")
    done = run("buckets", "models_to_build:mlp", *caps, "--plot", picture)
    assert_code(done, 0)
    side_by_side = done.stdout.partition("Side by side")[2]
    assert "25 MiB    1 MiB     0.1,2 MiB" in side_by_side
    assert "0         4.52 (6)  4.01 (4)  4.01 (4)" in side_by_side
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plot_has_a_title_and_labels(tmp_path, capsys):
    plot = tmp_path / "new folder" / "buckets.SVG"
    words = ["buckets", "models_to_build:mlp", "--bucket-cap-mb", "1", "--plot", str(plot)]
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # texts are stored as text
        assert run_command_line(words) == 0
    drawn = re.findall(r">([^<>]+)</text>", plot.read_text())
    assert "Buckets of models_to_build:mlp" in drawn
    assert "bucket sizes" in drawn and "1 MiB" in drawn
    assert any(text.startswith("gradients in MiB, in launch order.") for text in drawn)
    assert drawn.count("4.01") == drawn.count("0.508") == 1  # the labels of the buckets


def test_default_caps_have_a_small_first_bucket(capsys):
    assert run_command_line(["buckets", "models_to_build:mlp"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("default caps: ")
    assert [row[1] for row in _rows(said)] == ["6", "4", "2"]


@pytest.mark.parametrize(
    ("variable", "options", "title", "sizes"),
    [
        ("DDPX_BUCKET_CAP_MB", (), "DDPX_BUCKET_CAP_MB=0.001", ["6", "2", "1", "1", "1", "1"]),
        ("DDPX_BUCKET_PLAN", (), "DDPX_BUCKET_PLAN=plan.json", ["1", "5"]),
        ("DDPX_BUCKET_CAP_MB", ("--bucket-cap-mb", "25"), "25 MiB", ["6", "6"]),
        ("DDPX_BUCKET_PLAN", ("--bucket-cap-mb", "25"), "25 MiB", ["6", "6"]),
    ],
)
def test_variables_count_without_options(
    variable, options, title, sizes, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    names = [f"{layer}.{kind}" for layer in (0, 2, 3) for kind in ("weight", "bias")]
    BucketPlan(((names[0],), tuple(names[1:])), (0, 0)).save("plan.json")
    value = "0.001" if variable.endswith("MB") else "plan.json"
    monkeypatch.setenv(variable, value)
    assert run_command_line(["buckets", "models_to_build:mlp", *options]) == 0
    assert os.environ[variable] == value
    said = capsys.readouterr().out
    assert said.startswith(f"{title}: buckets")
    assert [row[1] for row in _rows(said)] == sizes
