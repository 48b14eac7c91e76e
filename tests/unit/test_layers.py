"""``scripts/check_layers.py`` reports each import and include that points up, and circles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_layers.py"


def _check(root: Path, *options: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(root), *options], capture_output=True, text=True
    )
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


PYTHON = {
    "ddpx/__init__.py": "from ddpx.ddp.module import ReducerDDP\n",
    "ddpx/errors.py": "",
    "ddpx/ddp/__init__.py": "",
    "ddpx/ddp/module.py": "from ddpx import _C, errors\nfrom ddpx.ddp import nested\n",
    "ddpx/ddp/nested.py": "import torch\n",
    "ddpx/cli/__init__.py": "from ddpx import ReducerDDP\n",
}


def test_imports_that_point_down(tmp_path):
    assert _check(_tree(tmp_path, PYTHON)) == (0, [])


def test_ddpx_itself():
    assert _check(SCRIPT.parents[1]) == (0, [])


@pytest.mark.parametrize(
    "text, line",
    [
        ("import ddpx.cli", 1),
        ("from ddpx import cli", 1),
        ("from ddpx.cli import main as m", 1),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ddpx import cli", 3),
        ("def f():\n    from ddpx.cli import main", 2),
        ("class A:\n    def f(self):\n        import ddpx.cli", 3),
    ],
    ids=["import", "from ddpx", "from module", "TYPE_CHECKING", "function", "method"],
)
def test_an_upward_import(tmp_path, text, line):
    code, problems = _check(_tree(tmp_path, PYTHON | {"ddpx/ddp/nested.py": text}))
    assert code == 1
    assert f"ddpx/ddp/nested.py:{line}: ddpx.ddp.nested depends on ddpx.cli" in problems[0]


def test_the_public_package_is_above_its_parts(tmp_path):
    text = "from ddpx import ReducerDDP"
    code, problems = _check(_tree(tmp_path, PYTHON | {"ddpx/ddp/nested.py": text}))
    assert code == 1
    assert "ddpx.ddp.nested depends on ddpx.__init__" in problems[0]


@pytest.mark.parametrize(
    "text",
    [
        "from ddpx.ddp.module import ReducerDDP",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ddpx.ddp import module",
        "def f():\n    import ddpx.ddp.module",
    ],
    ids=["top", "TYPE_CHECKING", "function"],
)
def test_a_circle_within_a_layer(tmp_path, text):
    code, problems = _check(_tree(tmp_path, PYTHON | {"ddpx/ddp/nested.py": text}))
    assert code == 1
    (problem,) = problems
    assert problem.startswith("circle: ")
    assert "ddpx.ddp.module" in problem and "ddpx.ddp.nested" in problem


def test_layers_on_one_line_are_independent(tmp_path):
    files = {
        "ddpx/timeline/__init__.py": "",
        "ddpx/elastic/__init__.py": "from ddpx import timeline\n",
    }
    code, problems = _check(_tree(tmp_path, PYTHON | files))
    assert code == 1
    assert "ddpx.elastic depends on ddpx.timeline" in problems[0]


def test_a_new_package_needs_a_layer(tmp_path):
    files = {"ddpx/new/__init__.py": "from ddpx import errors\n"}
    code, problems = _check(_tree(tmp_path, PYTHON | files))
    assert code == 1
    assert "ddpx.new is in no layer" in problems[0]


CPP = {
    "csrc/errors.h": "#include <string>\n",
    "csrc/comm/collective.h": '#include "../errors.h"\n',
    "csrc/buckets/plan.h": "",
    "csrc/buckets/bucket.h": '#include "plan.h"\n',
    "csrc/buckets/bucket.cpp": '#include "bucket.h"\n#include "../comm/collective.h"\n',
}


def test_includes_that_point_down(tmp_path):
    assert _check(_tree(tmp_path, CPP), "--cpp") == (0, [])


def test_an_upward_include(tmp_path):
    files = {"csrc/comm/collective.cpp": '// first line\n#include "../buckets/plan.h"\n'}
    root = _tree(tmp_path, CPP | files)
    assert _check(root) == (0, [])  # only with --cpp
    code, problems = _check(root, "--cpp")
    assert code == 1
    assert (
        "csrc/comm/collective.cpp:2: csrc/comm/collective depends on csrc/buckets/plan"
        in (problems[0])
    )


def test_a_source_file_counts_as_its_header(tmp_path):
    files = {"csrc/buckets/plan.cpp": '#include "bucket.h"\n'}
    code, problems = _check(_tree(tmp_path, CPP | files), "--cpp")
    assert code == 1
    assert problems == ["circle: csrc/buckets/bucket -> csrc/buckets/plan -> csrc/buckets/bucket"]


def test_a_new_room_needs_a_layer(tmp_path):
    files = {"csrc/attic/old.h": '#include "../errors.h"\n'}
    code, problems = _check(_tree(tmp_path, CPP | files), "--cpp")
    assert code == 1
    assert "csrc/attic/old is in no layer" in problems[0]
