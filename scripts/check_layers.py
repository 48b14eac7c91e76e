"""Checks the direction of imports in ddpx/ and of includes in csrc/.

    python scripts/check_layers.py [--cpp] [ROOT]

A layer may depend only on layers that come before it in the tables below. Layers on one line may
not depend on each other. A module belongs to the layer with the longest name that fits. Imports
under TYPE_CHECKING and inside functions count. A circle between the files of a layer is an error.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

Layers = Sequence[Sequence[str]]  # from low to high

PYTHON_LAYERS: Layers = (
    ("ddpx._C", "ddpx.version"),
    ("ddpx.errors", "ddpx.frames"),
    ("ddpx.build_info", "ddpx.settings"),
    ("ddpx.health",),
    ("ddpx.params",),
    ("ddpx.comm", "ddpx.planning"),
    ("ddpx.reducer",),
    ("ddpx.ddp.user_module",),
    ("ddpx.ddp.arguments",),
    ("ddpx.ddp.backward_hooks",),
    ("ddpx.ddp.search",),
    ("ddpx.ddp.replica",),
    ("ddpx.ddp.interface",),
    ("ddpx.ddp.fronts",),
    ("ddpx.ddp.functions",),
    ("ddpx.ddp",),
    ("ddpx.timeline.model", "ddpx.timeline.texts"),
    ("ddpx.timeline.record",),
    ("ddpx.timeline.analyze",),
    ("ddpx.timeline.export",),
    ("ddpx.timeline", "ddpx.elastic"),
    ("ddpx.integrations", "ddpx.testing"),
    ("ddpx.__init__",),
    ("ddpx.cli",),
    ("ddpx.__main__",),
)

# "csrc/." stands for the files directly in csrc/. A file x.cpp counts as x.h.
CPP_LAYERS: Layers = (
    ("csrc/.",),
    ("csrc/os",),
    ("csrc/shm", "csrc/health/times"),
    ("csrc/health/machine",),
    ("csrc/health/hosts",),
    ("csrc/health",),
    ("csrc/health_c10d",),
    ("csrc/comm",),
    ("csrc/buckets",),
    ("csrc/observe",),
    ("csrc/readiness",),
    ("csrc/autograd",),
    ("csrc/reducer",),
    ("csrc/shm_backend",),
    ("csrc/bindings",),
)

# Team runs an algorithm of collectives.h, and the algorithms call Team.
MAY_BE_MUTUAL = {("csrc/shm/team", "csrc/shm/collectives")}

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Dependency:
    """An import or an include.

    Attributes:
        source: The dotted module, or the path without a suffix, that has the dependency.
        target: The module or path that ``source`` depends on.
        place: File and line.
    """

    source: str
    target: str
    place: str


# ---- Python --------------------------------------------------------------------------------------


def python_imports(root: Path) -> list[Dependency]:
    """Every import of a module of ddpx in ``root/ddpx``."""
    paths = {_module(path, root): path for path in sorted(root.glob("ddpx/**/*.py"))}
    modules = {*paths, "ddpx._C"}
    return [
        Dependency(source, target, f"{path.relative_to(root)}:{line}")
        for source, path in paths.items()
        for target, line in _imported(path, modules)
    ]


def _module(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    if parts[-1] == "__init__" and len(parts) > 2:
        parts = parts[:-1]
    return ".".join(parts)


def _imported(path: Path, modules: set[str]) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise SystemExit(f"{path}:{node.lineno}: import by the absolute name instead.")
            names = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, name in names:
            if module.partition(".")[0] == "ddpx":
                inner = f"{module}.{name}"
                module = "ddpx.__init__" if module == "ddpx" else module
                yield (inner if inner in modules else module), node.lineno


# ---- C++ -----------------------------------------------------------------------------------------


def cpp_includes(root: Path) -> list[Dependency]:
    """Every include of a file of ``root/csrc`` in another file there."""
    found = []
    for path in sorted([*root.glob("csrc/**/*.h"), *root.glob("csrc/**/*.cpp")]):
        text = path.read_text()
        for match in _INCLUDE.finditer(text):
            for folder in (path.parent, root / "csrc"):
                included = (folder / match[1]).resolve()
                if included.is_file() and included.is_relative_to((root / "csrc").resolve()):
                    line = text.count("\n", 0, match.start(1)) + 1
                    source, target = _unit(path.resolve(), root), _unit(included, root)
                    if source != target:
                        place = f"{path.relative_to(root)}:{line}"
                        found.append(Dependency(source, target, place))
                    break
    return found


def _unit(path: Path, root: Path) -> str:
    inner = path.relative_to((root / "csrc").resolve()).with_suffix("")
    return f"csrc/./{inner}" if len(inner.parts) == 1 else f"csrc/{inner}"


# ---- the check -----------------------------------------------------------------------------------


def problems(dependencies: Iterable[Dependency], layers: Layers) -> list[str]:
    """A sentence for each dependency that points up, and for a circle."""
    heights = {name: height for height, names in enumerate(layers) for name in names}
    found, graph = [], defaultdict(set)
    for dependency in dependencies:
        source, target = (_layer(n, heights) for n in (dependency.source, dependency.target))
        if (dependency.source, dependency.target) not in MAY_BE_MUTUAL:
            graph[dependency.source].add(dependency.target)
        for name, layer in ((dependency.source, source), (dependency.target, target)):
            if layer is None:
                found.append(f"{dependency.place}: {name} is in no layer. Add it to the table.")
        if source is None or target is None or source == target:
            continue
        if heights[target] >= heights[source]:
            found.append(
                f"{dependency.place}: {dependency.source} depends on {dependency.target}, but "
                f"{source} is not above {target} in scripts/check_layers.py."
            )
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"circle: {' -> '.join(reversed(error.args[1]))}")
    return found


def _layer(name: str, heights: dict[str, int]) -> str | None:
    """The longest name in the table that is ``name`` or a package around it."""
    fitting = [n for n in heights if name == n or name.startswith((f"{n}.", f"{n}/"))]
    return max(fitting, key=len, default=None)


def main() -> int:
    """Prints problems. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--cpp", action="store_true", help="check csrc/, too")
    options = parser.parse_args()
    found = problems(python_imports(options.root), PYTHON_LAYERS)
    if options.cpp:
        found += problems(cpp_includes(options.root), CPP_LAYERS)
    for problem in found:
        print(problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
