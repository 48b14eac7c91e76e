"""Selects a part of a matrix of test cases, so that every two values of two parameters meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

Case = Mapping[str, Hashable]


def all_rows(
    values: Mapping[str, Sequence[Any]], valid: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """All valid cases of a matrix."""
    rows = [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]
    return [row for row in rows if valid(row)]


def cover_pairs(cases: Sequence[Case], seed: object) -> list[int]:
    """Return indices of a few cases that contain every pair of values of all cases.

    The selection is greedy: each round takes the case with the most new pairs. Among equal cases, a
    random generator with ``seed`` decides.
    """
    order = list(range(len(cases)))
    random.Random(str(seed)).shuffle(order)
    pairs = {index: _pairs(cases[index]) for index in order}
    missing = set().union(*pairs.values()) if pairs else set()
    chosen = []
    while missing:
        best = max(order, key=lambda index: len(pairs[index] & missing))
        order.remove(best)
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen)


def _pairs(case: Case) -> set[Hashable]:
    values = sorted(case.items(), key=lambda item: item[0])
    if len(values) == 1:
        return {values[0]}
    return set(itertools.combinations(values, 2))
