"""A plan of buckets as a file: which parameter lies in which bucket, by name."""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpx.params import ManagedParam
from ddpx.params.dtensors import local_part

_FORMAT = "ddpx bucket plan 1"
_MIB = 1024 * 1024
_MOST_NAMES = 5


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of a model, in the order in which they are reduced.

    :func:`ddpx.bucket_plan` returns the plan of a wrapper. ``ReducerDDP(bucket_plan=)`` and
    ``DDPX_BUCKET_PLAN`` use a plan from the first step on. One plan gives the same sums in each
    run. Another plan may give other bits at three or more ranks over gloo and NCCL, which sum a
    gradient in an order that depends on its place in the bucket.

    Attributes:
        buckets: The names of the parameters of each bucket.
        num_bytes: The size of each bucket.

    Example:
        >>> plan = ddpx.bucket_plan(model)
        >>> plan.buckets
        (('weight', 'bias'),)
        >>> plan.save("plan.json")
        >>> ddpx.BucketPlan.load("plan.json") == plan
        True
    """

    buckets: tuple[tuple[str, ...], ...]
    num_bytes: tuple[int, ...]

    @classmethod
    def load(cls, path: str | Path) -> BucketPlan:
        """Reads a file of :meth:`save`.

        Args:
            path: The path of the file.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file has no plan.

        Example:
            >>> ddpx.bucket_plan(model).save("plan.json")
            >>> ddpx.BucketPlan.load("plan.json").num_bytes
            (20,)
        """
        try:
            data = json.loads(Path(path).read_text())
            if data["format"] != _FORMAT:
                raise ValueError(f"its format is {data['format']!r}, not {_FORMAT!r}")
            buckets = tuple(
                tuple(str(name) for name in bucket["params"]) for bucket in data["buckets"]
            )
            return cls(buckets, tuple(int(bucket["bytes"]) for bucket in data["buckets"]))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(
                f"{path} is no bucket plan ({type(error).__name__}: {error}). "
                "Write a plan with ddpx.bucket_plan(model).save(path)."
            ) from error

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON.

        Args:
            path: The path of the file.

        Raises:
            OSError: The file cannot be written.

        Example:
            >>> ddpx.bucket_plan(model).save("plan.json")
        """
        buckets = [
            {"bytes": num_bytes, "params": list(names)}
            for names, num_bytes in zip(self.buckets, self.num_bytes, strict=True)
        ]
        Path(path).write_text(json.dumps({"format": _FORMAT, "buckets": buckets}, indent=1) + "\n")

    @property
    def cap_mb_list(self) -> list[float]:
        """``bucket_cap_mb_list`` for torch's DDP, with which DDP makes the same buckets.

        This holds if gradients arrive in the order of the plan, and all have one dtype.
        """
        return [num_bytes / _MIB for num_bytes in self.num_bytes]

    @property
    def digest(self) -> str:
        """A short text that differs between plans."""
        return hashlib.sha256(repr(self.buckets).encode()).hexdigest()[:16]


def plan_of(indices: Sequence[Sequence[int]], managed: Sequence[ManagedParam]) -> BucketPlan:
    """The plan with these buckets of parameters, by index into ``managed``."""
    return BucketPlan(
        tuple(tuple(managed[index].name for index in bucket) for bucket in indices),
        tuple(sum(local_part(managed[i].tensor).nbytes for i in bucket) for bucket in indices),
    )


def indices_of(plan: BucketPlan, managed: Sequence[ManagedParam]) -> list[list[int]]:
    """The buckets of a model's parameters, by index into ``managed``.

    Raises:
        ValueError: The plan does not fit the parameters.
    """
    by_name = {param.name: index for index, param in enumerate(managed)}
    named = [name for bucket in plan.buckets for name in bucket]
    _check_names(named, set(by_name))
    if not all(plan.buckets):
        raise _does_not_fit(f"bucket {plan.buckets.index(())} is empty")
    buckets = [[by_name[name] for name in bucket] for bucket in plan.buckets]
    for number, bucket in enumerate(buckets):
        kinds = {(managed[i].tensor.dtype, managed[i].tensor.device) for i in bucket}
        if len(kinds) > 1:
            kind = " and ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise _does_not_fit(f"bucket {number} has parameters of {kind}")
        sparse = [managed[i].name for i in bucket if managed[i].expect_sparse]
        if sparse and len(bucket) > 1:
            raise _does_not_fit(
                f"bucket {number} has {sparse[0]!r}, whose sparse gradient needs a bucket of "
                "its own"
            )
    return buckets


def _check_names(named: list[str], existing: set[str]) -> None:
    unknown = [name for name in named if name not in existing]
    if unknown:
        raise _does_not_fit(f"the model does not average {_listed(unknown)}")
    missing = sorted(existing - set(named))
    if missing:
        raise _does_not_fit(f"the plan lacks {_listed(missing)}")
    twice = sorted(name for name, count in collections.Counter(named).items() if count > 1)
    if twice:
        raise _does_not_fit(f"several buckets have {_listed(twice)}")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def _does_not_fit(why: str) -> ValueError:
    return ValueError(
        f"the bucket plan does not fit this model: {why}. Make a plan for this model: "
        "ddpx.bucket_plan(model).save(path)."
    )
