"""The bucket plan of a model, without a process group."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ddpx import _C, errors, params
from ddpx.ddp.arguments.options import Options
from ddpx.planning import indices_of

MIB = 1 << 20


@dataclass(frozen=True)
class Bucket:
    """One bucket of a plan.

    Attributes:
        params: The names of the parameters, in the order of the bucket.
        num_bytes: The size of all gradients. A sparse gradient counts as a dense one.
    """

    params: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True)
class Plan:
    """The buckets of a model.

    Attributes:
        caps: The bucket sizes, as text.
        first: The buckets of the first step.
        rebuilt: The buckets of later steps, if gradients arrive in reverse order of registration.
            None if later steps have the first buckets.
    """

    caps: str
    first: tuple[Bucket, ...]
    rebuilt: tuple[Bucket, ...] | None

    @property
    def lasting(self) -> tuple[Bucket, ...]:
        """The buckets of later steps."""
        return self.first if self.rebuilt is None else self.rebuilt


def plan_buckets(module: nn.Module, options: Options, caps: str) -> Plan:
    """Returns the plan that ReducerDDP would make for ``module``.

    Raises:
        RuntimeError: No parameter requires a gradient.
    """
    managed = params.managed_params(module, params.ignored_names(module))
    if not managed:
        raise errors.nothing_to_train()
    metas = [_C.ParamMeta(param.tensor, param.expect_sparse) for param in managed]

    def named(plan: _C.BucketPlan) -> tuple[Bucket, ...]:
        return tuple(
            Bucket(
                tuple(managed[index].name for index in bucket),
                sum(metas[index].numel * metas[index].element_bytes for index in bucket),
            )
            for bucket in plan.buckets
        )

    if options.bucket_plan is not None:
        indices_of(options.bucket_plan, managed)
        listed = zip(options.bucket_plan.buckets, options.bucket_plan.num_bytes, strict=True)
        return Plan(caps, tuple(Bucket(*bucket) for bucket in listed), None)
    first = named(_C.BucketPlan.initial(metas, options.caps, options.mode))
    if options.find_unused_parameters:  # buckets are never rebuilt in this mode
        return Plan(caps, first, None)
    order = list(reversed(range(len(metas))))
    return Plan(caps, first, named(_C.BucketPlan.by_arrival(metas, options.caps, order)))
