"""The public names of ddpx, with their docstrings."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ADAPTERS = ("accelerate", "lightning", "ray", "transformers")
# Modules whose classes only hold data.
_DATA_MODULES = ("ddpx.timeline.model", "ddpx.timeline.analyze.summary")
# ddpx.health exports these functions for other modules of ddpx.
_NOT_FOR_USERS = frozenset(
    (
        "begin",
        "between_steps",
        "collective_call",
        "constructing",
        "explained",
        "failed_between_steps",
        "find_fronts_by",
        "introduction",
        "meet",
        "publish_fault",
        "waiting_for_buffers",
        "watch",
    )
)


@dataclass(frozen=True)
class PublicName:
    """A public class, function, method or property.

    Attributes:
        name: The dotted name, as users write the name.
        docstring: The docstring. Empty if there is none.
        needs_example: True for functions, methods, and classes with behaviour.
        fields: The names of parameters, or of a dataclass's fields.
    """

    name: str
    docstring: str
    needs_example: bool
    fields: tuple[str, ...] = ()


def public_names() -> list[PublicName]:
    """All public names, each once, in order of their modules."""
    found = {name.name: name for name in _all_names()}
    return list(found.values())


def _all_names() -> Iterator[PublicName]:
    ddpx = importlib.import_module("ddpx")
    yield from _of_module("ddpx", ddpx.__all__)
    method = importlib.import_module("ddpx.reducer").Reducer.prepare_for_backward
    yield _of_object("ddpx.reducer.Reducer.prepare_for_backward", method)
    names = set(ddpx.health.__all__) - _NOT_FOR_USERS - set(ddpx.__all__)
    yield from _of_module("ddpx.health", sorted(names))
    yield from _of_module("ddpx.testing", importlib.import_module("ddpx.testing").__all__)
    yield from _of_module("ddpx.planning", ["Gradient", "ReduceCost", "best_partition"])
    for module in _DATA_MODULES:
        for name, value in vars(importlib.import_module(module)).items():
            if inspect.isclass(value) and value.__module__ == module and name[0] != "_":
                yield from _of_module(module, [name])
    for library in ADAPTERS:
        yield from _of_source(f"ddpx.integrations.{library}")


def _of_module(module: str, names: list[str]) -> Iterator[PublicName]:
    for name in names:
        value = getattr(importlib.import_module(module), name)
        if inspect.isclass(value):
            yield from _of_class(f"{module}.{name}", value)
        elif callable(value):
            yield _of_object(f"{module}.{name}", value)


def _of_class(name: str, cls: type) -> Iterator[PublicName]:
    docstring = inspect.cleandoc(cls.__doc__ or "")
    if dataclasses.is_dataclass(cls):
        fields = tuple(field.name for field in dataclasses.fields(cls) if field.repr)
        holds_data = cls.__module__ in (*_DATA_MODULES, "ddpx.health.failure")
        yield PublicName(name, docstring, not holds_data, fields)
    else:
        yield PublicName(name, docstring, True)
    for base in cls.__mro__:
        if not base.__module__.startswith("ddpx.") or base.__module__ == "ddpx._C":
            continue
        for member, value in vars(base).items():
            is_method = isinstance(value, (classmethod, staticmethod)) or callable(value)
            if member.startswith("_") or inspect.isclass(value):
                continue
            if is_method:
                yield _of_object(f"{name}.{member}", getattr(cls, member))
            elif inspect.isdatadescriptor(value) or hasattr(value, "func"):  # a cached_property
                yield PublicName(f"{name}.{member}", inspect.getdoc(value) or "", False)


def _of_object(name: str, function: object) -> PublicName:
    parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    fields = tuple(parameter for parameter in parameters if parameter != "self")
    return PublicName(name, inspect.getdoc(function) or "", True, fields)


def _of_source(module: str) -> Iterator[PublicName]:
    """The public names of a module whose library may be absent, from its source code."""
    path = ROOT / (module.replace(".", "/") + ".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            yield _of_node(f"{module}.{node.name}", node)
            for child in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(child, ast.FunctionDef) and not child.name.startswith("_"):
                    yield _of_node(f"{module}.{node.name}.{child.name}", child)


def _of_node(name: str, node: ast.ClassDef | ast.FunctionDef) -> PublicName:
    docstring = ast.get_docstring(node) or ""
    if isinstance(node, ast.ClassDef):
        return PublicName(name, docstring, True)
    arguments = node.args
    all_of_them = (
        *arguments.posonlyargs,
        *arguments.args,
        arguments.vararg,
        *arguments.kwonlyargs,
        arguments.kwarg,
    )
    fields = tuple(a.arg for a in all_of_them if a is not None and a.arg != "self")
    is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)
    return PublicName(name, docstring, not is_property, fields)
