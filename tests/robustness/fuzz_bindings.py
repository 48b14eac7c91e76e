"""Calls all bindings of ``ddpx._C`` at random, by the types of its stub. Runs as a program.

    python tests/robustness/fuzz_bindings.py --seed 1 --examples 100 --log /tmp/calls

Each example is a short sequence of calls. The log has the calls of the running example, and thus
the call that crashed or hung. A call may return or raise. An exception must have a text.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import faulthandler
import os
import resource
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fuzz_values import (
    CALLABLES,
    DEVICES,
    DTYPES,
    DURATIONS,
    FLOATS,
    INTS,
    Drawn,
    Groups,
    draw_anything,
    draw_tensor,
    literal,
)
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import ddpx
from ddpx import _C

# Functions that read for the whole process, or end something.
NOT_CALLED = {"take_health_record", "set_health_log_reader", "fail_rank", "leave_groups"}
# Only the core creates these, and not in a group of one rank. test_bad_input.py tests a Monitor.
NOT_MADE = {"LostRank", "RankReport", "HealthRecord", "Monitor"}
# Groups would wait for absent peers, so a shared-memory group has at most one rank.
BY_NAME = {"size": st.sampled_from([1, 0, -1])}
# For classes without a constructor in the stub: the attribute of another object that gives one, or
# None.
PARTS = {
    "StepReport": ("Reducer", lambda reducer: reducer.report),
    "StepTimes": ("Reducer", lambda reducer: reducer.report.times),
    "BucketPlan": ("Reducer", lambda reducer: reducer.plan),
    "PlanInForce": ("Recording", lambda recording: next(iter(recording.plans), None)),
}
MOST_CALLS = 8
MEMORY_BYTES = 8 << 30  # more than the process has at the start


@dataclass(frozen=True)
class Target:
    """A binding: a function (``owner`` is empty), a constructor, a method or a property."""

    owner: str
    name: str
    kind: str  # "call", "get" or "set"
    args: tuple[tuple[str, ast.expr | None], ...] = ()
    is_static: bool = False


def targets() -> list[Target]:
    """All declarations of ``_C.pyi``. tests/unit/test_stub.py compares them with the module."""
    stub = ast.parse((Path(ddpx.__file__).parent / "_C.pyi").read_text())
    found = []
    for node in stub.body:
        if isinstance(node, ast.FunctionDef):
            found.append(_target("", node))
        elif isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
            found += [_target(node.name, method) for method in methods]
    return [target for target in found if target.name not in NOT_CALLED]


def _target(owner: str, node: ast.FunctionDef) -> Target:
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    is_static = "staticmethod" in decorators
    if "property" in decorators:
        return Target(owner, node.name, "get")
    args = node.args.args[0 if is_static or not owner else 1 :]
    kind = "set" if any(decorator.endswith(".setter") for decorator in decorators) else "call"
    return Target(
        owner, node.name, kind, tuple((arg.arg, arg.annotation) for arg in args), is_static
    )


class Program:
    """The calls of one example, and the objects that they created."""

    def __init__(self, data: st.DataObject, groups: Groups, log: Path) -> None:
        self._draw = data.draw
        self._groups = groups
        self._log = log
        self._made: dict[str, list[Drawn]] = {}
        self._params: list[torch.Tensor] = []
        log.write_text("")

    def run(self, all_targets: list[Target]) -> None:
        for _ in range(self._draw(st.integers(1, MOST_CALLS))):
            if self._draw(st.integers(0, 4)) == 0:
                self._train()
            else:
                self._call(self._draw(st.sampled_from(all_targets)))

    def _call(self, target: Target) -> None:
        if target.owner and target.name != "__init__" and not target.is_static:
            owner = self._instance(target.owner)
        else:
            owner = Drawn(getattr(_C, target.owner) if target.owner else _C, target.owner or "_C")
        if owner is None:
            return
        args = [self._argument(name, annotation) for name, annotation in target.args]
        if self._draw(st.integers(0, 19)) == 0:
            args = args[:-1] if self._draw(st.booleans()) else [*args, literal(None)]
        texts = ", ".join(arg.text for arg in args)
        values = [arg.value for arg in args]
        if target.name == "__init__":
            self._make(target.owner, values, texts)
        elif target.kind == "call":
            what = f"{owner.text}.{target.name}({texts})"
            self._attempt(what, lambda: getattr(owner.value, target.name)(*values))
        elif target.kind == "get":
            what = f"{owner.text}.{target.name}"
            self._attempt(what, lambda: repr(getattr(owner.value, target.name)))
        elif values:
            what = f"{owner.text}.{target.name} = {texts}"
            self._attempt(what, lambda: setattr(owner.value, target.name, values[0]))

    def _attempt(self, what: str, action: Any) -> Any:
        """The result of a call, or None if it raises."""
        with self._log.open("a") as log:
            log.write(what.encode("utf-8", "backslashreplace").decode() + "\n")
        try:
            return action()
        except SystemError as error:
            raise AssertionError(f"{what} left Python in disorder: {error!r}") from error
        except Exception as error:
            assert str(error), f"{what} raised {error!r}, which says nothing"
            return None

    def _make(self, class_name: str, values: list[Any], texts: str) -> Drawn | None:
        made = self._made.setdefault(class_name, [])
        text = f"{class_name.lower()}_{len(made)}"
        what = f"{text} = {class_name}({texts})"
        value = self._attempt(what, lambda: getattr(_C, class_name)(*values))
        if value is None:
            return None
        made.append(Drawn(value, text))
        return made[-1]

    def _instance(self, class_name: str) -> Drawn | None:
        """An earlier instance or a new one. None if neither is possible."""
        made = self._made.get(class_name, [])
        if made and self._draw(st.integers(0, 4)) != 0:
            return self._draw(st.sampled_from(made))
        cls = getattr(_C, class_name)
        if hasattr(cls, "__members__"):
            name = self._draw(st.sampled_from([*cls.__members__, 77]))
            if name == 77:
                return Drawn(cls(77), f"{class_name}(77)")
            return Drawn(cls.__members__[name], f"{class_name}.{name}")
        if class_name in PARTS:
            whole, get = PARTS[class_name]
            owner = self._instance(whole)
            part = owner and get(owner.value)
            return part and Drawn(part, f"{class_name} of {owner.text}")
        if class_name == "Reducer":
            return self._reducer()
        constructor = next(
            (t for t in TARGETS if (t.owner, t.name) == (class_name, "__init__")), None
        )
        if constructor is None:
            return None
        args = [self._right(name, annotation) for name, annotation in constructor.args]
        return self._make(class_name, [a.value for a in args], ", ".join(a.text for a in args))

    def _reducer(self) -> Drawn | None:
        """A reducer that can most likely be trained with."""
        tensors = [draw_tensor(self._draw) for _ in range(self._draw(st.integers(1, 3)))]
        self._params += [tensor.value for tensor in tensors]
        sparse = self._draw(st.integers(0, 3)) == 0
        params = [_C.ReducerParam(t.value, "w", sparse) for t in tensors]
        group = self._right("", ast.parse("dist.ProcessGroup", mode="eval").body)
        mode = self._instance("GraphMode")
        assert mode is not None
        view = self._draw(st.booleans())
        options = _C.ReducerOptions(_C.BucketCaps(8, 8), mode.value, view)
        values = [params, group.value, None, options]
        texts = f"{[t.text for t in tensors]} (sparse: {sparse}), {group.text}, caps of 8 bytes, "
        return self._make("Reducer", values, texts + f"{mode.text}, {view}")

    def _argument(self, name: str, annotation: ast.expr | None) -> Drawn:
        if self._draw(st.integers(0, 7)) == 0:
            return draw_anything(self._draw, self._groups)
        return self._right(name, annotation)

    def _right(self, name: str, annotation: ast.expr | None) -> Drawn:
        """A value of the type that the stub declares, though not always a sensible one."""
        if name in BY_NAME:
            return literal(self._draw(BY_NAME[name]))
        if isinstance(annotation, ast.BinOp):  # X | None, X | Y
            if self._draw(st.booleans()):
                return self._right(name, annotation.right)
            return self._right(name, annotation.left)
        if isinstance(annotation, ast.Constant) and annotation.value is None:
            return literal(None)
        if isinstance(annotation, ast.Subscript):
            kind = ast.unparse(annotation.value)
            if kind == "Callable":
                chosen = self._draw(st.sampled_from(list(CALLABLES)))
                return Drawn(CALLABLES[chosen], f"<function: {chosen}>")
            if kind == "tuple":
                elements = ast.Tuple([annotation.slice])
                if isinstance(annotation.slice, ast.Tuple):
                    elements = annotation.slice
                each = [self._right("", element) for element in elements.elts]
                return Drawn(tuple(e.value for e in each), f"({', '.join(e.text for e in each)},)")
            if kind == "Mapping":
                assert isinstance(annotation.slice, ast.Tuple)
                key, value = (self._right("", each) for each in annotation.slice.elts)
                return Drawn({key.value: value.value}, f"{{{key.text}: {value.text}}}")
            assert kind in ("Sequence", "list"), kind
            items = [
                self._right("", annotation.slice) for _ in range(self._draw(st.integers(0, 4)))
            ]
            return Drawn([i.value for i in items], f"[{', '.join(i.text for i in items)}]")
        text = ast.unparse(annotation) if annotation else "object"
        simple = {
            "int": INTS,
            "float": FLOATS,
            "bool": st.booleans(),
            "str": st.text(max_size=5),
            "timedelta": DURATIONS,
            "torch.dtype": DTYPES,
            "torch.device": DEVICES,
            "dist.BuiltinCommHookType": st.sampled_from(
                [dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS]
            ),
        }
        if text in simple:
            return literal(self._draw(simple[text]))
        if text == "torch.Tensor":
            return draw_tensor(self._draw)
        if text == "dist.ProcessGroup":
            chosen = self._draw(st.sampled_from(list(self._groups.groups)))
            return Drawn(self._groups.groups[chosen], f"<{chosen}>")
        if text == "dist.Work":
            chosen = self._draw(st.sampled_from(list(self._groups.groups)))
            group = self._groups.groups[chosen]
            work = self._attempt("<work>", lambda: group.allreduce([torch.ones(2)]))
            return Drawn(work, f"<work of {chosen}>")
        if text == "dist.Store":
            return Drawn(self._groups.new_store(), "<store>")
        if text == "Backend":
            return Drawn(self._groups.new_gloo(), "<gloo>")
        if text == "object":
            return draw_anything(self._draw, self._groups)
        return self._instance(text) or literal(None)

    def _train(self) -> None:
        """A step with all existing reducers."""
        reducers = [made.value for made in self._made.get("Reducer", [])]
        if not reducers:
            return
        times = self._draw(st.sampled_from([1, 1, 3, 12]))
        for _ in range(times):
            self._attempt("<step>", lambda: _step(reducers, self._params))


def _step(reducers: list[_C.Reducer], params: list[torch.Tensor]) -> None:
    for reducer in reducers:
        reducer.prepare_forward()
    loss = torch.zeros(())
    for param in params:
        # the tensors cannot be used in a computation
        with contextlib.suppress(RuntimeError, ValueError):
            dense = param if param.layout == torch.strided else param.to_dense()
            loss = loss + dense.abs().sum().float()
    output = loss * 1
    for reducer in reducers:
        reducer.watch_outputs([output])
    output.backward()


TARGETS = targets()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--examples", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    arguments = parser.parse_args()
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["DDPX_FORCE_COMM"] = "1"
    groups = Groups()
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY_BYTES, resource.RLIM_INFINITY))

    @seed(arguments.seed)
    @settings(
        max_examples=arguments.examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(data=st.data())
    def fuzz(data: st.DataObject) -> None:
        Program(data, groups, arguments.log).run(TARGETS)

    fuzz()
    print(f"{arguments.examples} examples")


if __name__ == "__main__":
    main()
