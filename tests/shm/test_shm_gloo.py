"""Compares the transport's core with torch's gloo group, bit for bit."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cmake_build import build_torch_free, run
from free_port import free_port

# As in csrc/shm/types.h.
DTYPES = {
    torch.float16: 0,
    torch.bfloat16: 1,
    torch.float32: 2,
    torch.float64: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int32: 7,
    torch.int64: 8,
}
OPS = {"SUM": 0, "AVG": 1, "MIN": 2, "MAX": 3, "PRODUCT": 4}
ALL_REDUCE, REDUCE_SCATTER = 0, 3
GLOO_ORDER = 0
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

# Fewer elements than ranks; odd; around the limits of one-shot and of a piece; where gloo's
# segments reach 1 MiB.
COUNTS = [1, 2, 7, 33, 1000, 16_384, 16_385, 100_003]
LARGE_COUNTS = [1_835_009, 3_000_001]


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation with one kind of input."""

    kind: int
    dtype: torch.dtype
    op: str
    count: int  # number of elements of a rank's input
    values: str = "normal"

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kind}-{dtype}-{self.op}-{self.count}-{self.values}"

    def input(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.count % 65_536 + rank)
        if not self.dtype.is_floating_point:
            values = torch.randint(-100, 100, (self.count,), generator=generator)
            return values.to(self.dtype)
        values = torch.randn(self.count, generator=generator, dtype=torch.float64)
        if self.values == "special":
            # NaN on one rank only; infinities, zeros of both signs, denormals, overflow.
            special = torch.tensor(
                [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -6e-8, 6e4, 3e38]
            )
            where = torch.randint(0, len(special), (self.count,), generator=generator)
            values = special.double()[where]
            values[torch.isnan(values) & (torch.arange(self.count) % 3 != rank)] = 1.0
        return values.to(self.dtype)


def cases_of(size: int) -> list[Case]:
    cases = []
    for count in COUNTS:
        cases += [Case(ALL_REDUCE, dtype, "SUM", count) for dtype in FLOATS]
        cases.append(Case(REDUCE_SCATTER, torch.float32, "SUM", count * size))
    for op in OPS:
        for count in (7, 16_385):
            dtypes = FLOATS if op == "AVG" else list(DTYPES)
            cases += [Case(ALL_REDUCE, dtype, op, count) for dtype in dtypes]
    for dtype in FLOATS:
        for op in ("SUM", "MIN", "MAX", "AVG"):
            cases.append(Case(ALL_REDUCE, dtype, op, 30_001, "special"))
    if size <= 4:
        for count in LARGE_COUNTS:
            cases += [Case(ALL_REDUCE, dtype, "SUM", count) for dtype in FLOATS]
    return cases


def gloo_rank(rank: int, size: int, port: int, directory: str) -> None:
    """Write the inputs of this rank and the results of gloo."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    for case in cases_of(size):
        data = case.input(rank)
        path = Path(directory, case.name)
        path.with_name(f"{case.name}.in.{rank}").write_bytes(raw(data))
        op = getattr(dist.ReduceOp, case.op)
        if case.kind == ALL_REDUCE:
            dist.all_reduce(data, op)
        else:
            output = torch.empty(case.count // size, dtype=case.dtype)
            dist.reduce_scatter_tensor(output, data, op)
            data = output
        path.with_name(f"{case.name}.gloo.{rank}").write_bytes(raw(data))
    dist.destroy_process_group()


def same(ours: bytes, gloo: bytes, dtype: torch.dtype) -> bool:
    """Compare bit for bit, but ignore the sign and payload of NaN.

    The compiler chooses which of two NaN becomes the result of a sum, in gloo and in ddpx.
    """
    if ours == gloo:
        return True
    a, b = (torch.frombuffer(bytearray(data), dtype=dtype) for data in (ours, gloo))
    not_nan = ~(torch.isnan(a) & torch.isnan(b))
    return a.shape == b.shape and raw(a[not_nan]) == raw(b[not_nan])


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "size", [2, *(pytest.param(size, marks=pytest.mark.full_only) for size in (3, 4)), 5, 8]
)
def test_bit_for_bit_as_gloo(size: int, tmp_path: Path) -> None:
    worker = build_torch_free("address", "shm_worker")
    arguments = (size, free_port(), str(tmp_path))
    mp.start_processes(gloo_rank, arguments, size, start_method="forkserver")
    for place in ("private", "resident"):
        lines = []
        for case in cases_of(size):
            count = case.count if case.kind == ALL_REDUCE else case.count // size
            lines.append(
                f"{case.name} {case.kind} {DTYPES[case.dtype]} {OPS[case.op]} {GLOO_ORDER} "
                f"{place} {count}"
            )
        run(worker, tmp_path, size, input="\n".join(lines))
        different = []
        for case in cases_of(size):
            for rank in range(size):
                ours = (tmp_path / f"{case.name}.out.{rank}").read_bytes()
                gloo = (tmp_path / f"{case.name}.gloo.{rank}").read_bytes()
                if not same(ours, gloo, case.dtype):
                    different.append(f"{case.name} rank {rank}")
        assert not different, f"{place}: {len(different)} results differ: {different[:20]}"
