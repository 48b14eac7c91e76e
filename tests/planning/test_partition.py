"""The search for the best partition, against all partitions, and against the greedy rule."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import pytest
import torch

from ddpx.planning import Gradient, ReduceCost, best_partition


def _gradients(draw: random.Random, count: int) -> list[Gradient]:
    times = sorted(draw.uniform(0, 1) for _ in range(count))
    return [Gradient(draw.choice([4, 1_000, 50_000, 900_000]), time) for time in times]


def _cost(draw: random.Random, kind: str) -> ReduceCost:
    alpha, beta = draw.uniform(0, 0.2), draw.uniform(0, 3e-6)
    sizes = (1, 1_000, 100_000, 2_000_000)
    if kind == "linear":
        return ReduceCost((size, 1e-6 + alpha + beta * size) for size in sizes)
    return ReduceCost(
        (size, draw.uniform(1e-3, 0.5)) for size in sizes
    )  # neither convex nor concave


def _end_s(gradients: list[Gradient], partition: list[int], cost: ReduceCost) -> float:
    """When all buckets are reduced, for these numbers of gradients in a bucket."""
    end_s = 0.0
    rest = iter(gradients)
    for count in partition:
        bucket = list(itertools.islice(rest, count))
        end_s = max(end_s, *(gradient.ready_s for gradient in bucket))
        end_s += cost(sum(gradient.num_bytes for gradient in bucket))
    return end_s


def _all_partitions(count: int) -> list[list[int]]:
    found = []
    for cuts in itertools.product((False, True), repeat=count - 1):
        partition = [1]
        for cut in cuts:
            if cut:
                partition.append(1)
            else:
                partition[-1] += 1
        found.append(partition)
    return found


@pytest.mark.parametrize("kind", ["linear", "any"])
def test_no_partition_ends_earlier(kind):
    draw = random.Random(1)
    for _ in range(60):
        gradients, cost = _gradients(draw, draw.randint(1, 9)), _cost(draw, kind)
        partition = best_partition(gradients, cost)
        assert sum(partition) == len(gradients) and min(partition) > 0
        best = min(_end_s(gradients, each, cost) for each in _all_partitions(len(gradients)))
        assert _end_s(gradients, partition, cost) == pytest.approx(best, rel=1e-12)


def _mg_wfbp(gradients: list[Gradient], alpha: float, beta: float) -> list[int]:
    """The greedy rule: merge with the next gradient if this one would start after the next arrives,
    or if the wait costs less than a start."""
    partition: list[int] = []
    end_s = 0.0
    size, num_bytes = 0, 0
    for gradient, later in itertools.zip_longest(gradients, gradients[1:]):
        size, num_bytes = size + 1, num_bytes + gradient.num_bytes
        start_s = max(gradient.ready_s, end_s)
        if later and (later.ready_s <= start_s or later.ready_s - start_s < alpha):
            continue
        end_s = start_s + alpha + beta * num_bytes
        partition.append(size)
        size, num_bytes = 0, 0
    return partition


def test_the_greedy_rule_is_never_better_and_often_worse():
    draw = random.Random(2)
    num_worse = 0
    for _ in range(100):
        gradients = _gradients(draw, 40)
        alpha, beta = draw.uniform(0.001, 0.1), draw.uniform(1e-9, 1e-7)
        cost = ReduceCost((size, alpha + beta * size) for size in (1, 10**6, 10**8))
        ours = _end_s(gradients, best_partition(gradients, cost), cost)
        greedy = _end_s(gradients, _mg_wfbp(gradients, alpha, beta), cost)
        assert ours <= greedy * (1 + 1e-9)
        num_worse += greedy > ours * 1.001
    assert num_worse > 20


def test_many_gradients():
    draw = random.Random(3)
    gradients = _gradients(draw, 500)
    partition = best_partition(gradients, _cost(draw, "linear"))
    assert sum(partition) == 500


def test_costs():
    cost = ReduceCost([(1_000, 0.002), (2_000, 0.001), (4_000, 0.004)])
    assert cost(500) == cost(1_000) == 0.002
    assert cost(2_000) == 0.002  # never less than for a smaller size
    assert cost(3_000) == pytest.approx(0.003) and cost(6_000) == pytest.approx(0.006)
    assert cost.of(torch.tensor([500, 6_000])).tolist() == pytest.approx([0.002, 0.006])
    for points in (
        [],
        [(1, 1.0)],
        [(1, 1.0), (1, 2.0)],
        [(0, 1.0), (2, 1.0)],
        [(1, 0.0), (2, 1.0)],
    ):
        with pytest.raises(ValueError, match="two positive sizes"):
            ReduceCost(points)


def test_costs_warn_of_nothing() -> None:
    """torch warns once a process, so the costs are computed in a new one."""
    script = "from ddpx.planning import ReduceCost; ReduceCost([(1, 1.0), (2, 2.0)])(1)"
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", script], check=True)
