"""ddpx/_C.pyi names exactly what the extension has."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ddpx
from ddpx import _C

STUB = ast.parse((Path(ddpx.__file__).parent / "_C.pyi").read_text())


def _declared(body: list[ast.stmt]) -> set[str]:
    names = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def _public(namespace: object) -> set[str]:
    names = {name for name in vars(namespace) if not name.startswith("_")}
    return names | ({"__init__"} & set(vars(namespace)))


def test_module():
    assert _declared(STUB.body) == _public(_C)


@pytest.mark.parametrize(
    "declared", [node for node in STUB.body if isinstance(node, ast.ClassDef)], ids=lambda n: n.name
)
def test_class(declared):
    cls = getattr(_C, declared.name)
    if hasattr(cls, "__members__"):  # an enum: pybind adds the members that every enum has
        values = _declared(declared.body) - {"name", "__int__", "__members__"}
        added = {name for name, found in vars(cls).items() if isinstance(found, property)}
        added -= {"name", "value", "__members__", "__doc__"}
        assert values == set(cls.__members__) | added
        return
    bound = _public(cls)
    if "__init__" not in _declared(declared.body):  # no constructor is bound: that of pybind raises
        bound -= {"__init__"}
    assert _declared(declared.body) == bound
