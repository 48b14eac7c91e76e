"""The study guide docs/internals.md: its commands print the shown output, and its names exist."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from forked_scripts import run_python

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "internals.md"
TEXT = GUIDE.read_text()
SCRIPTS = sorted((ROOT / "docs" / "internals").glob("*.py"))
TIME_LIMIT = 100.0  # seconds; a command takes about 5 on two idle cores
ANYTHING = "…"  # within a line: any text; as a line: any number of lines


@dataclass(frozen=True)
class Command:
    """A command in the guide, and the lines that it must print."""

    line: str
    shown: tuple[str, ...]


def commands(text: str) -> Iterator[Command]:
    for block in re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, *shown = part.splitlines()
            yield Command(line, tuple(shown))


def as_shown(shown: tuple[str, ...], printed: str) -> bool:
    pattern = ""
    for line in shown:
        if line.strip() == ANYTHING:
            pattern += r"(?:[^\n]*\n)*?"
        else:
            pattern += r"[^\n]*".join(map(re.escape, line.rstrip().split(ANYTHING))) + r"[ ]*\n"
    return re.fullmatch(pattern, printed) is not None


# A command imports torch in up to three processes, so the short run has every third command.
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.full_only] if number % 3 else [])
        for number, command in enumerate(commands(TEXT))
    ],
    ids=lambda c: c.line.split("/")[-1][:30],
)
def test_command_prints_what_is_shown(command: Command) -> None:
    program, *args = shlex.split(command.line)
    assert program == "python"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = run_python(*args, cwd=ROOT, env=env, limit_s=TIME_LIMIT)
    assert done.returncode == 0, done.stderr
    assert as_shown(command.shown, done.stdout), f"it printed:\n{done.stdout}"


def test_every_script_is_shown() -> None:
    shown = " ".join(command.line for command in commands(TEXT))
    assert SCRIPTS
    for path in SCRIPTS:
        if "__main__" in path.read_text():
            assert f"docs/internals/{path.name}" in shown
        else:  # a module that another script imports
            assert f"](internals/{path.name})" in TEXT


@pytest.mark.parametrize(
    ("shown", "printed", "expected"),
    [
        ("a … c", "a b c\n", True),
        ("a … c", "a b d\n", False),
        ("a\n…\nc", "a\nb\nb\nc\n", True),
        ("a\n…\nc", "a\nb\n", False),
        ("a", "a\nb\n", False),
        ("a.c", "abc\n", False),
    ],
)
def test_comparison_with_what_is_shown(shown: str, printed: str, expected: bool) -> None:
    assert as_shown(tuple(shown.splitlines()), printed) is expected


# ---- names -------------------------------------------------------------------------------------

HEADERS = [path.read_text() for path in (ROOT / "csrc").rglob("*.h")]
SOURCES = "".join(path.read_text() for path in (ROOT / "csrc").rglob("*.cpp"))
MODULES = [path.read_text() for path in (*(ROOT / "ddpx").rglob("*.py"), *SCRIPTS)]
TORCH_REDUCER = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/reducer.hpp"


def cpp_member_exists(owner: str, member: str) -> bool:
    if owner == "ddpx":  # as shown by torch's profiler
        return f'"ddpx::{member}"' in SOURCES
    declares = re.compile(rf"\b(?:class|struct|enum class) (?:\w+\([^)]*\) )?{owner}\b[^;]*\{{")
    return any(
        declares.search(header) and re.search(rf"\b{member}\b", header) for header in HEADERS
    )


def python_member_exists(owner: str, member: str) -> bool:
    return any(
        re.search(rf"^class {owner}\b", module, re.MULTILINE)
        and re.search(rf"^    def {member}\(", module, re.MULTILINE)
        for module in MODULES
    )


def function_exists(name: str) -> bool:
    return (
        any(re.search(rf"\b{name}\(", header) for header in HEADERS)
        or any(re.search(rf"\bdef {name}\(", module) for module in MODULES)
        or hasattr(torch.Tensor, name)
        or hasattr(torch.nn.Module, name)
    )


def exists(name: str) -> bool:
    """Whether a name in backticks exists. True for text that is not a name."""
    if in_torch := re.fullmatch(r"c10d::Reducer::(\w+)", name):
        return re.search(rf"\b{in_torch[1]}\(", TORCH_REDUCER.read_text()) is not None
    if in_cpp := re.fullmatch(r"(\w+)::(\w+)", name):
        return cpp_member_exists(in_cpp[1], in_cpp[2])
    if in_python := re.fullmatch(r"([A-Z]\w+)\.(\w+)", name):
        return python_member_exists(in_python[1], in_python[2])
    if function := re.fullmatch(r"(?:\w+\.)*(\w+)\(\)", name):
        return function_exists(function[1])
    return True


def names_in(text: str) -> set[str]:
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`([^`\n]+)`", prose))


def missing_files(text: str, folder: Path = GUIDE.parent) -> list[str]:
    paths = re.findall(r"(?<![\w/])((?:csrc|ddpx|tests|docs)/[\w/]+\.(?:h|cpp|py|md))\b", text)
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    return [path for path in paths if not (ROOT / path).is_file()] + [
        link for link in links if not (folder / link).exists()
    ]


def test_names_exist() -> None:
    names = names_in(TEXT)
    assert {"Reducer::on_grad", "BucketPlan::by_arrival", "pack_scaled_dense()"} <= names
    assert [name for name in sorted(names) if not exists(name)] == []


@pytest.mark.parametrize(
    "page",
    [GUIDE, ROOT / "docs" / "architecture.md", *(ROOT / "docs" / "internals").glob("*.md")],
    ids=lambda page: page.name,
)
def test_files_exist(page: Path) -> None:
    assert missing_files(page.read_text(), page.parent) == []


@pytest.mark.parametrize(
    "name",
    ["Reducer::no_such", "NoClass::fill", "Options.no_such", "no_such()", "c10d::Reducer::no_such"],
)
def test_wrong_names_are_found(name: str) -> None:
    assert not exists(name)


def test_missing_files_are_found() -> None:
    assert missing_files("csrc/no_such.h and [a link](no_such.md)") == [
        "csrc/no_such.h",
        "no_such.md",
    ]
