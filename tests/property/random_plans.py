"""Draws plans whose every step has a correct result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from random_modules import DTYPES, KINDS, OUTPUT_TYPES, SHAPES, Layer, MicroBatch, Plan, Step, Use
from random_steps import KINDS as MICRO_BATCHES

Draw = Callable[[st.SearchStrategy[Any]], Any]
MODES: tuple[dict[str, bool], ...] = (
    {},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
)
CAPS: tuple[dict[str, Any], ...] = (
    {},
    {"bucket_cap_mb": 0},
    {"bucket_cap_mb": 0.0001},
    {"bucket_cap_mb": 0.0005},
    {"bucket_cap_mb_list": [0.0001, 0.001]},
)


def _layer(index: int, draw: Draw) -> Layer:
    kind = draw(st.sampled_from(KINDS))
    tied = index > 0 and "linear" in kind and draw(st.booleans())
    return Layer(
        kind=kind,
        dtype=draw(st.sampled_from(sorted(DTYPES, reverse=True))),
        shape=draw(st.sampled_from(SHAPES)) if kind == "scale" else (),
        frozen=index > 0 and not tied and draw(st.integers(0, 5)) == 5,
        tied=tied,
    )


def _group(layers: tuple[Layer, ...], index: int) -> int:
    """The layer whose weight this layer uses."""
    kind, dtype = layers[index].kind, layers[index].dtype
    if not layers[index].tied:
        return index
    return next(i for i, layer in enumerate(layers) if (layer.kind, layer.dtype) == (kind, dtype))


def _uses(layers: tuple[Layer, ...], all_used: bool, draw: Draw) -> tuple[Use, ...]:
    indices = st.integers(0, len(layers) - 1)
    order = [0, *draw(st.lists(indices, max_size=6))]
    if all_used:
        order += [i for i in range(len(layers)) if i not in order]
    kinds = draw(st.sampled_from([("none",), ("none", "non-reentrant"), ("none", "reentrant")]))
    checkpoints = [draw(st.sampled_from(kinds)) for _ in order]
    # An error would be correct if the number of parts of a gradient grew after the first step.
    fixed = {_group(layers, i) for i, c in zip(order, checkpoints, strict=True) if c == "reentrant"}
    # A loss that bypasses a hidden output and reaches no parameter may wait forever, so the first
    # output stays visible.
    return tuple(
        Use(i, c, position > 0 and _group(layers, i) not in fixed and draw(st.booleans()))
        for position, (i, c) in enumerate(zip(order, checkpoints, strict=True))
    )


def _kinds(mode: dict[str, bool], uses: tuple[Use, ...], output_type: str) -> list[str]:
    """Usages in which each backward has as many parts of a gradient as the first backward."""
    reentrant = any(use.checkpoint == "reentrant" for use in uses)
    kinds = list(MICRO_BATCHES)
    if reentrant:  # and torch refuses autograd.grad there
        for kind in ("sum of two", "gradient of an input", "outputs apart, in reverse"):
            kinds.remove(kind)
    # Only default mode knows which outputs may still have a backward, since they are visible there.
    if "static_graph" in mode or (not mode and output_type == "custom"):
        kinds = [kind for kind in kinds if not kind.startswith("outputs apart")]
    return kinds


def _per_rank(world: int, draw: Draw, among: list[int], likely: bool) -> tuple[frozenset[int], ...]:
    """A set for each rank: empty, the same on all ranks, or one per rank."""
    if not among or draw(st.integers(0, 3)) >= (3 if likely else 1):
        return (frozenset(),) * world
    sets = st.frozensets(st.sampled_from(among))
    if draw(st.booleans()):
        return (draw(sets),) * world
    return tuple(draw(sets) for _ in range(world))


def _steps(
    world: int,
    layers: tuple[Layer, ...],
    uses: tuple[Use, ...],
    mode: dict[str, bool],
    kinds: list[str],
    draw: Draw,
) -> tuple[Step, ...]:
    optional = [i for i, use in enumerate(uses) if use.optional]
    likely = bool(mode)
    left_out = _per_rank(world, draw, optional, likely)
    in_parts = {_group(layers, use.layer) for use in uses if use.checkpoint == "reentrant"}
    always = {use.layer for use in uses if not use.optional}
    learned = False
    steps = []
    for _ in range(draw(st.integers(2, 5))):
        if "static_graph" not in mode:
            left_out = _per_rank(world, draw, optional, likely)
        micro_batches = tuple(
            MicroBatch(draw(st.sampled_from(kinds)), draw(st.integers(0, 3)) != 3)
            for _ in range(draw(st.integers(1, 3)))
        )
        apart = any(m.kind.startswith("outputs apart") for m in micro_batches)
        if apart and not mode:
            left_out = (frozenset(),) * world
        can_freeze = [
            i
            for i, layer in enumerate(layers)
            if i > 0
            and not (layer.tied or layer.frozen)
            # A param that is frozen when the number of parts is learned must be frozen later, too.
            # A static graph does not check again who uses the param.
            and (learned or i not in in_parts)
            and (i in always or (learned and "static_graph" not in mode))
        ]
        frozen = _per_rank(world, draw, can_freeze, likely=False)
        if "find_unused_parameters" not in mode:  # ranks must freeze the same params
            frozen = (frozen[0],) * world
        if apart and not mode:  # with zeros from one rank, a second mean differs from the first
            frozen = (frozenset(),) * world
        reverse = tuple(draw(st.booleans()) for _ in range(world))
        steps.append(Step(micro_batches, left_out, frozen, reverse))
        learned = learned or any(m.sync for m in micro_batches)
    return tuple(steps)


@st.composite
def plans(draw: Draw, world: int) -> Plan:
    mode = draw(st.sampled_from(MODES))
    options = {**mode, **draw(st.sampled_from(CAPS))}
    for switch in ("gradient_as_bucket_view", "batched_grad_copy"):
        if draw(st.booleans()):
            options[switch] = True
    layers = tuple(_layer(i, draw) for i in range(draw(st.integers(1, 6))))
    uses = _uses(layers, not mode, draw)
    output_type = draw(st.sampled_from(OUTPUT_TYPES))
    return Plan(
        layers=layers,
        uses=uses,
        cut=draw(st.integers(0, len(uses) - 1)),
        output_type=output_type,
        options=tuple(sorted(options.items())),
        hook=all(layer.kind != "sparse" for layer in layers) and draw(st.integers(0, 5)) == 5,
        zero_style=draw(st.sampled_from(["none", "zeros", "keep"])),
        steps=_steps(world, layers, uses, mode, _kinds(mode, uses, output_type), draw),
    )
