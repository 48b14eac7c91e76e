"""Programs: a module, options and a list of actions, as small values that are sent to every rank.

``repr()`` of a program is a Python literal without default values. The literal can be pasted into
``found_programs.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Kinds of a parameter that scales its input, by shape. "empty" has no elements.
SHAPES: dict[str, tuple[int, ...]] = {
    "vector": (4,),
    "0-d": (),
    "cube": (3, 1, 4),
    "empty": (0, 2),
    "rows": (7, 4),
}
KINDS = ("linear", "no bias", "conv", "norm", "embedding", "sparse", "complex", "turned", *SHAPES)
OUTPUTS = ("tuple", "dict", "dataclass", "hidden")
MODES: dict[str, dict[str, bool]] = {
    "default": {},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "skip": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
}
HOOKS = ("allreduce", "doubled")
FRONTS = ("wrapper", "replicate")
AVERAGES = ("mean", "sum", "weights")
# Actions without arguments. program_models.py says what they do.
ACTS = (
    "optimizer step",
    "decay in gradients",
    "wrap again",
    "drop newest wrapper",
    "reset",
    "evaluate",
    "evaluation mode",
    "training mode",
    "copy",
    "check finite",
    "post-sync hook",
    "change buffers",
    "clear one gradient",
    "drop a forward",
    "record",
    "load state",
    "new storage",
)
EVERY_RANK = (0, 1)


class _Short:
    """A value whose ``repr()`` leaves out fields that have their default values."""

    def __repr__(self) -> str:
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis prints the value."""
        printer.text(repr(self))


@dataclass(frozen=True, repr=False)
class Layer(_Short):
    """A layer, and how its parameter is used.

    Attributes:
        kind: One of ``KINDS``.
        gradient: The form of the weight's gradient, a key of ``gradient_forms.FORMS``.
        dtype: The dtype of the parameters.
        calls: The number of calls in a forward.
        checkpoint: ``"none"``, ``"reentrant"`` or ``"non-reentrant"``.
        optional: Whether steps may leave out the layer.
        tied: Whether the layer has the weight of the first layer of its kind and dtype.
        frozen: Whether the layer is frozen when the module is wrapped.
        ignored: Whether the wrapper leaves out the layer.
    """

    kind: str = "linear"
    gradient: str = "plain"
    dtype: str = "float64"
    calls: int = 1
    checkpoint: str = "none"
    optional: bool = False
    tied: bool = False
    frozen: bool = False
    ignored: bool = False


@dataclass(frozen=True, repr=False)
class Step(_Short):
    """One micro-step.

    Attributes:
        usage: How forward and backward are called, a key of ``usages.USAGES``.
        local: What runs in ``no_sync()``: ``""``, ``"forward"``, ``"backward"`` or ``"both"``.
        zero: How gradients are zeroed before: ``"none"``, ``"zeros"`` or ``"keep"``.
        left_out: For each rank, the optional layers that the rank leaves out.
        reverse: The ranks that run all layers but the first in reverse order.
    """

    usage: str = "plain"
    local: str = ""
    zero: str = "none"
    left_out: tuple[tuple[int, ...], ...] = ((), ())
    reverse: tuple[int, ...] = ()


@dataclass(frozen=True, repr=False)
class Freeze(_Short):
    """Ranks freeze a layer, or unfreeze the layer."""

    layer: int
    ranks: tuple[int, ...] = EVERY_RANK
    frozen: bool = True


@dataclass(frozen=True, repr=False)
class Fail(_Short):
    """All ranks raise in the middle of a step, catch the exception and continue.

    Attributes:
        place: ``"forward"`` or ``"backward"``.
        local: Whether the step runs in ``no_sync()``.
    """

    place: str = "backward"
    local: bool = False


@dataclass(frozen=True, repr=False)
class Hook(_Short):
    """A communication hook is registered, if the wrapper has none."""

    kind: str = "doubled"


@dataclass(frozen=True, repr=False)
class Uneven(_Short):
    """Ranks train in ``join()``, each with its number of whole steps."""

    counts: tuple[int, int] = (1, 1)


@dataclass(frozen=True, repr=False)
class Act(_Short):
    """An action of ``ACTS``."""

    name: str


Action = Step | Freeze | Fail | Hook | Uneven | Act


@dataclass(frozen=True, repr=False)
class Program(_Short):
    """A module, the options of its wrapper, and what a script does with the wrapper.

    Attributes:
        actions: The actions, in order.
        layers: The layers of the module.
        mode: A key of ``MODES``.
        views: The option ``gradient_as_bucket_view``.
        options: Further options of the wrapper, except ``mixed_precision``.
        mixed: The dtype of ``mixed_precision``, or ``""``.
        manual: Whether the script ends each step with ``finalize_backward()``.
        output: The type of the module's output, one of ``OUTPUTS``.
        backend: The backend of the process group.
        front: The front of the module, one of ``FRONTS``.
        average: The option ``average``, one of ``AVERAGES``.
    """

    actions: tuple[Action, ...]
    layers: tuple[Layer, ...] = (Layer(),)
    mode: str = "default"
    views: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    mixed: str = ""
    manual: bool = False
    output: str = "tuple"
    backend: str = "gloo"
    front: str = "wrapper"
    average: str = "mean"


def original(layers: tuple[Layer, ...], index: int) -> int:
    """The index of the layer that has the weight of the layer ``index``."""
    layer = layers[index]
    if not layer.tied:
        return index
    same = ((other.kind, other.dtype) == (layer.kind, layer.dtype) for other in layers)
    return next(position for position, found in enumerate(same) if found)


def features(program: Program) -> frozenset[str]:
    """Words for what the program has. ``known.py`` uses these words."""
    words = {f"mode {program.mode}", f"output {program.output}", f"backend {program.backend}"}
    words |= {f"front {program.front}", f"average {program.average}"}
    words |= {f"option {name}" for name, _ in program.options}
    if program.views:
        words.add("views")
    if program.mixed:
        words.add("mixed precision")
    if program.manual:
        words.add("manual finalization")
    if sum(layer.kind == "sparse" for layer in program.layers) > 1:
        words.add("two sparse layers")
    for layer in program.layers:
        words |= {f"kind {layer.kind}", f"gradient {layer.gradient}", f"dtype {layer.dtype}"}
        words.add(f"checkpoint {layer.checkpoint}")
        words |= {name for name in ("optional", "tied", "ignored") if getattr(layer, name)}
        if layer.frozen:
            words.add("frozen when wrapped")
        if layer.calls > 1:
            words.add("called twice")
    for action in program.actions:
        words |= _words(action)
    return frozenset(words)


def _words(action: Action) -> set[str]:
    if isinstance(action, Act):
        return {action.name}
    if isinstance(action, Freeze):
        return {"freeze"} if action.ranks == EVERY_RANK else {"freeze", "freeze on one rank"}
    if isinstance(action, Fail):
        return {f"fail in {action.place}"}
    if isinstance(action, Hook):
        return {"hook", f"hook {action.kind}"}
    if isinstance(action, Uneven):
        return {"uneven"} if len(set(action.counts)) > 1 else {"even in join"}
    words = {f"usage {action.usage}", f"zero {action.zero}"}
    if action.local:
        words |= {"local", f"local {action.local}"}
    if any(action.left_out):
        words.add("left out")
    if len(set(action.left_out)) > 1:
        words.add("left out on one rank")
    if action.reverse:
        words.add("reverse")
    return words
