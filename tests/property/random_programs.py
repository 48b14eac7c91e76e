"""Draws valid programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from gradient_forms import FORMS, SPARSE_FORMS
from hypothesis import strategies as st
from known import is_known, known_faults
from programs import (
    ACTS,
    AVERAGES,
    DTYPES,
    EVERY_RANK,
    FRONTS,
    HOOKS,
    KINDS,
    MODES,
    OUTPUTS,
    Act,
    Action,
    Fail,
    Freeze,
    Hook,
    Layer,
    Program,
    Step,
    Uneven,
)
from usages import USAGES
from valid_programs import valid

Draw = Callable[[st.SearchStrategy[Any]], Any]

RANK_SETS = (EVERY_RANK, (0,), (1,))
MAX_LAYERS = 5
MAX_ACTIONS = 10
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "bucket_cap_mb": st.sampled_from([0.0001, 0.0005, 0]),
    "batched_grad_copy": st.just(True),
    "forward_sync_buffers": st.just(False),
    "transport": st.just("group"),
    "lazy_bucket_allocation": st.just(True),
    "reduce_dtype": st.sampled_from([torch.float32]),
}


def _seldom(usual: Any, others: Sequence[Any], parts: int = 4) -> st.SearchStrategy[Any]:
    """``usual`` in most examples. Shrinks to ``usual``."""
    return st.integers(0, parts).flatmap(
        lambda part: st.sampled_from(list(others)) if part == parts else st.just(usual)
    )


def _often(usual: Any, others: Sequence[Any]) -> st.SearchStrategy[Any]:
    return st.sampled_from([usual, *others])


def _unknown(kind: str, choices: Iterable[str]) -> list[str]:
    """The choices without a known fault. ``kind`` and the choice are a word of ``features``."""
    return [choice for choice in choices if not is_known(f"{kind} {choice}".strip())]


FORM_NAMES = _unknown("gradient", dict.fromkeys([*FORMS, *SPARSE_FORMS]))
LAYERS = st.builds(
    Layer,
    kind=st.sampled_from(KINDS),
    gradient=_often("plain", FORM_NAMES),
    dtype=_seldom("float64", tuple(DTYPES), 2),
    calls=_seldom(1, (2,)),
    checkpoint=_seldom("none", ("reentrant", "non-reentrant"), 6),
    optional=st.booleans(),
    tied=st.booleans(),
    frozen=_seldom(False, (True,), 6),
    ignored=_seldom(False, (True,), 8),
)
INDICES = st.integers(0, MAX_LAYERS - 1)
LEFT_OUT = st.lists(INDICES, max_size=2).map(lambda found: tuple(sorted(set(found))))
STEPS = st.builds(
    Step,
    usage=st.sampled_from(["plain", "plain", "plain", *_unknown("usage", USAGES)]),
    local=_seldom("", ("both", "forward", "backward"), 3),
    zero=_often("none", ("zeros", "keep")),
    left_out=st.just(((), ()))
    | LEFT_OUT.map(lambda out: (out, out))
    | st.tuples(LEFT_OUT, LEFT_OUT),
    reverse=_seldom((), RANK_SETS),
)
FREEZES = st.builds(
    Freeze,
    layer=INDICES,
    ranks=st.sampled_from([EVERY_RANK] if is_known("freeze on one rank") else RANK_SETS),
    frozen=st.booleans().map(lambda thaw: not thaw),
)
UNEVEN = st.builds(Uneven, st.tuples(st.integers(0, 2), st.integers(0, 2)).filter(any))
FAILURES = st.builds(Fail, place=st.sampled_from(["forward", "backward"]), local=st.booleans())
ACTS_OR_HOOKS = st.builds(Act, st.sampled_from(_unknown("", ACTS))) | st.builds(
    Hook, st.sampled_from(HOOKS)
)
# Steps are as probable as all other actions together.
ACTIONS: st.SearchStrategy[Action] = st.sampled_from(
    [STEPS] * 6 + [FREEZES, FAILURES, UNEVEN] + [ACTS_OR_HOOKS] * 3
).flatmap(lambda actions: actions)


@st.composite
def _options(draw: Draw) -> tuple[tuple[str, Any], ...]:
    chosen = {}
    for name, values in OPTIONS.items():
        if draw(st.integers(0, 3)) == 3:
            chosen[name] = draw(values)
    return tuple(chosen.items())


@st.composite
def _drawn(draw: Draw) -> Program:
    actions = draw(st.lists(ACTIONS, max_size=MAX_ACTIONS))
    if not actions or not isinstance(actions[-1], Step):
        actions.append(Step())  # which shows what the actions before have done
    program = Program(
        actions=tuple(actions),
        layers=tuple(draw(st.lists(LAYERS, min_size=1, max_size=MAX_LAYERS))),
        mode=draw(st.sampled_from(list(MODES))),
        views=draw(st.booleans()),
        options=draw(_options()),
        mixed=draw(_seldom("", ("bfloat16", "float16"), 8)),
        manual=draw(_seldom(False, (True,), 2)),
        output=draw(st.sampled_from(OUTPUTS)),
        backend=draw(_seldom("gloo", ("shm",), 4)),
        front=draw(_seldom("wrapper", FRONTS[1:], 2)),
        average=draw(_seldom("mean", AVERAGES[1:], 2)),
    )
    return valid(program)


def programs() -> st.SearchStrategy[Program]:
    """Valid programs without known faults."""
    return _drawn().filter(lambda program: not known_faults(program))
