"""Selects a part of a matrix of test cases, so that every two values of two parameters meet.

Numbers of ranks are an exception: the part has each of them, but not with every other value. A
fault that needs one number of ranks and one mode is rare, and most test functions have both params.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

Case = Mapping[str, Hashable]
NUMBERS_OF_RANKS = ("world", "world_size")


def all_rows(
    values: Mapping[str, Sequence[Any]], valid: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """All valid cases of a matrix."""
    rows = [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]
    return [row for row in rows if valid(row)]


def cover(cases: Sequence[Case], seed: object, strength: int = 2) -> list[int]:
    """Return indices of a few cases that contain every pair of values of all cases.

    With ``strength`` 1, they contain every value. The selection is greedy: each round takes the
    case with the most new pairs. Among equal cases, a random generator with ``seed`` decides.
    """
    order = list(range(len(cases)))
    random.Random(str(seed)).shuffle(order)
    covered = {index: _combinations(cases[index], strength) for index in order}
    missing = set().union(*covered.values()) if covered else set()
    chosen = []
    while missing:
        best = max(order, key=lambda index: len(covered[index] & missing))
        order.remove(best)
        chosen.append(best)
        missing -= covered[best]
    return sorted(chosen)


def _combinations(case: Case, strength: int) -> set[Hashable]:
    """The combinations of ``strength`` values, and the values that need no other value."""
    alone = {item for item in case.items() if item[0] in NUMBERS_OF_RANKS}
    others = sorted((item for item in case.items() if item not in alone), key=lambda item: item[0])
    return alone | set(itertools.combinations(others, min(strength, len(others))))
