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
    "as in DDP with views, a backward averages kept gradients of a parameter that no rank uses; "
    "ranks differ where one of them has cleared its gradient, or has trained alone": tuple(
        ("views", f"mode {mode}", action, "zero keep")
        for mode in ("unused", "skip")
        for action in ("clear one gradient", "uneven")
    ),
}

# docs/divergences.md, and DDP's own limits: DDP raises, hangs or is wrong. The hand-made average
# alone judges these programs.
DDP_DIFFERS: tuple[tuple[str, ...], ...] = (
    ("average sum",),
    ("average weights",),
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
    ("mode static", "uneven"),
    ("mode static", "usage gradient penalty"),
    ("mode unused", "usage gradient penalty"),
    ("mode skip", "usage gradient penalty"),
    ("mode skip", "left out on one rank"),
    ("wrap again", "views"),
    ("views", "decay in gradients"),  # an error, depending on the layout of buckets
    ("hook", "kind complex"),
    # DDP halves a gradient that shares values with a sparse one. 16-bit tolerances hide that.
    ("kind sparse", "dtype bfloat16"),
    ("kind sparse", "dtype float16"),
)

# Features with which ReducerDDP may raise an error, and words of the error.
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


def has_late_errors(program: Program) -> bool:
    """Whether an error of the program may come after its last step."""
    return any(_has_one(program, (needed,)) for needed, _ in MAY_RAISE)


def may_raise(program: Program, found: Sequence[str]) -> bool:
    """Whether ranks raise an error that the docs announce for the program.

    The other ranks raise the error one step later, when the program may be over.

    Args:
        program: The program.
        found: For each rank, its error or the first difference.
    """
    for needed, words in MAY_RAISE:
        raised = [bool(re.search(words, text)) for text in found]
        crashed = any("Traceback" in text and not re.search(words, text) for text in found)
        if _has_one(program, (needed,)) and any(raised) and not crashed:
            return True
    return False
