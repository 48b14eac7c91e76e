"""Sparse gradients whose rows are known, and their memory, with hooks on several streams."""

from __future__ import annotations

import pytest
import sparse_cases as cases
from device_models import check
from device_ranks import on_nccl

pytestmark = pytest.mark.timeout(120)


@on_nccl(2)
@pytest.mark.parametrize("case", [cases.average, cases.drop_an_average_while_it_is_read])
def test_sparse_gradients(device_ranks, device, world_size, case):
    check(device_ranks(device, world_size).run(case, device))


@pytest.mark.parametrize(
    "case", [cases.drop_a_gradient_of_another_stream, cases.fail_before_rows_are_read]
)
def test_memory_of_sparse_gradients(device_ranks, case):
    check(device_ranks("late", 2).run(case, "late"))
