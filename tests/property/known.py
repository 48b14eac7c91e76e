"""Features of programs that the search leaves out, and features with other rules.

An entry is a set of words of ``programs.features``. It holds for programs with all its words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from programs import Program, features

# Faults that are known and not yet mended, each with its reason. The search draws no program with
# such a set of features. ``found_programs.py`` has a program for each entry, which must fail.
KNOWN: dict[str, tuple[tuple[str, ...], ...]] = {
    "copies into buckets ignore lazy conjugates": (("gradient conj",), ("gradient conj neg",)),
    "copies into buckets refuse lazy negations": (("gradient neg",),),
    "copies into buckets refuse zero tensors": (("gradient zero tensor",),),
    "a functional forward is no forward of the wrapper": (
        ("usage functional",),
        ("usage functional in part",),
    ),
    "a param that one rank has frozen stays without the average": (("freeze on one rank",),),
    "a param that all ranks freeze after a local micro-step keeps local gradients": (
        ("mode unused", "local", "freeze"),
        ("mode skip", "local", "freeze"),
    ),
    "a static graph counts the parts of gradients in a first backward that failed": (
        ("mode static", "checkpoint reentrant", "fail in backward"),
    ),
    "a wrapper that averages again has lost its settings": (("drop newest wrapper",),),
}

# docs/divergences.md, and DDP's own limits: DDP raises, hangs or is wrong. The hand-made average
# alone judges these programs.
DDP_DIFFERS: tuple[tuple[str, ...], ...] = (
    ("usage bypass",),
    ("usage ffbb",),
    ("usage fbb",),
    ("usage sum of two",),
    ("usage outputs apart",),
    ("usage outputs apart, in reverse",),
    ("local backward",),
    ("fail in backward",),
    ("output hidden",),
    ("checkpoint reentrant",),
    ("mixed precision",),
    ("option reduce_dtype",),
    ("copy",),  # DDP's copies average only over the default group
    ("mode default", "left out"),
    ("mode default", "freeze"),
    ("mode static", "freeze"),
    ("mode skip", "left out on one rank"),
    ("wrap again", "views"),
    ("hook", "kind complex"),
)

# Features with which ReducerDDP may raise an error on all ranks, and words of the error.
MAY_RAISE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("mode default", "freeze on one rank"), "requires_grad|freez|frozen"),
    (("mode static", "freeze on one rank"), "requires_grad|freez|frozen"),
)


def _has_one(program: Program, sets: tuple[tuple[str, ...], ...]) -> bool:
    words = features(program)
    return any(words.issuperset(needed) for needed in sets)


def is_known(word: str) -> bool:
    """Whether each program with this feature has a known fault."""
    return any((word,) in sets for sets in KNOWN.values())


def known_faults(program: Program) -> list[str]:
    """The reasons for which the search leaves out the program."""
    return [reason for reason, sets in KNOWN.items() if _has_one(program, sets)]


def ddp_differs(program: Program) -> bool:
    """Whether DDP is no oracle for the program."""
    return _has_one(program, DDP_DIFFERS)


def may_raise(program: Program, errors: Sequence[str]) -> bool:
    """Whether the errors of all ranks are those that the docs announce for the program."""
    return any(
        _has_one(program, (needed,)) and all(re.search(words, error) for error in errors)
        for needed, words in MAY_RAISE
    )
