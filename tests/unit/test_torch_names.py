"""docs/internals/torch_names.md lists the private names of torch that ddpx uses.

The installed torch has each of them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/internals/torch_names.md"
PYTHON, CPP = (ROOT / PAGE).read_text().split("## C++")
EXPRESSIONS = re.findall(r"^\| `(torch[^`]*)` \|", PYTHON, re.MULTILINE)
ATTRIBUTES = re.findall(r"^\| `(_\w+)` \| `([\w.]+)` \|", PYTHON, re.MULTILINE)
HEADERS = re.findall(r"^\| `([\w/.]+)` \| (`.*?`) \|", CPP, re.MULTILINE)
SOURCES = sorted((ROOT / "ddpx").rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in SOURCES}
NOT_TORCH = {"_fields"}  # of named tuples


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


# ---- the installed torch has the listed names ----------------------------------------------------


def _evaluate(expression: str) -> Any:
    """Imports the modules that the expression begins with, and evaluates it."""
    parts = re.match(r"[\w.]+", expression).group().split(".")  # type: ignore[union-attr]
    for end in range(2, len(parts) + 1):
        try:
            importlib.import_module(".".join(parts[:end]))
        except ImportError:
            break
    return eval(expression, {"torch": torch})


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_torch_has_the_name(expression):
    if "nccl" in expression and not torch.distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    try:
        _evaluate(expression)
    except AttributeError as error:
        pytest.fail(f"torch {torch.__version__} lacks {expression}: {error}. See {PAGE}.")


@pytest.mark.parametrize(("name", "module"), ATTRIBUTES)
def test_torch_uses_the_attribute(name, module):
    source = inspect.getsource(importlib.import_module(module))
    if not re.search(rf"\b{name}\b", source):
        pytest.fail(f"{module} of torch {torch.__version__} does not use {name}. See {PAGE}.")


def _text_of(header: str) -> str:
    """The header, and torch's headers that it includes: torch moves headers between folders."""
    folders = [Path(folder) for folder in cpp_extension.include_paths()]
    (path,) = [folder / header for folder in folders if (folder / header).exists()] or [None]
    if path is None:
        pytest.fail(f"torch {torch.__version__} lacks the header {header}. See {PAGE}.")
    text = path.read_text()
    for included in re.findall(r"#include <(torch/csrc/[^>]*)>", text):
        text += "".join(
            (folder / included).read_text() for folder in folders if (folder / included).exists()
        )
    return text


@pytest.mark.parametrize(("header", "names"), HEADERS)
def test_torch_has_the_header(header, names):
    words = set(re.findall(r"\w+", _text_of(header)))
    gone = [name for name in re.findall(r"`(\w+)`", names) if name not in words]
    assert not gone, f"{header} of torch {torch.__version__} lacks {gone}. See {PAGE}."


# ---- the page has the names that ddpx uses, and no others ----------------------------------------


def _own_attributes() -> set[str]:
    """The private attributes of classes of ddpx."""
    own = set(re.findall(r"def (_\w+)\(", (ROOT / "ddpx" / "_C.pyi").read_text()))
    for node in (node for tree in TREES.values() for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            own |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            names = [target for each in node.body for target in _targets(each)]
            own |= {name.id for name in names if isinstance(name, ast.Name)}
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                own.add(target.attr)
    return own


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [each for target in node.targets for each in getattr(target, "elts", [target])]
    return [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else []


def _private_names(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """Private names of torch in a module, with their lines."""
    imported: set[str] = set()  # names that are torch's, or of another library
    of_torch: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            for alias in node.names:
                path = alias.name if module is None else f"{module}.{alias.name}"
                bound = alias.asname or (path.split(".")[0] if module is None else alias.name)
                imported.add(bound)
                if path.split(".")[0] == "torch":
                    of_torch.add(bound)
                    yield from (
                        (node.lineno, part) for part in path.split(".") if _is_private(part)
                    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            root = re.match(r"\w*", ast.unparse(node)).group()  # type: ignore[union-attr]
            foreign = root not in imported and node.attr not in own
            if root in of_torch or foreign:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and _is_private(name.value) and name.value not in own:
                yield node.lineno, name.value


def _used() -> dict[str, str]:
    """The private names of torch in ddpx/, each with a place."""
    own = _own_attributes()
    return {
        name: f"{path.relative_to(ROOT)}:{line}"
        for path, tree in TREES.items()
        for line, name in _private_names(tree, own)
        if name not in NOT_TORCH
    }


def _listed() -> set[str]:
    parts = {part for expression in EXPRESSIONS for part in re.findall(r"\w+", expression)}
    return {part for part in parts if _is_private(part)} | {name for name, _ in ATTRIBUTES}


def test_each_name_that_ddpx_uses_is_listed():
    missing = {name: place for name, place in _used().items() if name not in _listed()}
    assert not missing, f"add these private names of torch to {PAGE}: {missing}"


def test_each_listed_name_is_used():
    text = "".join(path.read_text() for path in SOURCES)
    unused = [name for name in _listed() if not re.search(rf"\b{name}\b", text)]
    assert not unused, f"remove these names from {PAGE}: {unused}"


def test_each_private_header_is_listed():
    sources = (path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".h"))
    text = "".join(path.read_text() for path in sources)
    included = set(re.findall(r"#include <((?:torch/csrc/|[\w/]+/impl/)[^>]+)>", text))
    assert included == {header for header, _ in HEADERS}, f"{PAGE} and csrc/ differ"


def test_the_names_of_other_libraries_do_not_count():
    tree = ast.parse("import sys, torch\nsys._getframe()\ntorch._one\nx._two\nself._three\n")
    assert [name for _, name in _private_names(tree, {"_three"})] == ["_one", "_two"]


def test_the_page_has_rows():
    assert len(EXPRESSIONS) > 20 and len(ATTRIBUTES) > 3 and len(HEADERS) > 15
