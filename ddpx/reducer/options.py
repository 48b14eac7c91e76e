"""Options of the reducer."""

from __future__ import annotations

from dataclasses import dataclass

from ddpx import _C


@dataclass(frozen=True)
class ReducerOptions:
    """How a reducer groups, copies and sums gradients.

    Attributes:
        caps: Bucket sizes in bytes.
        mode: What the reducer knows about unused parameters.
        gradient_as_bucket_view: ``param.grad`` is a part of the bucket.
        batched_grad_copy: Copy all gradients of a bucket together, when the bucket is full.
        skip_unused_buckets: Do not communicate a bucket that no rank used in the last step.
        precision: The dtypes of sums and of averaged gradients.
        lazy_bucket_allocation: Dense buckets have memory only within steps.
    """

    caps: _C.BucketCaps
    mode: _C.GraphMode
    gradient_as_bucket_view: bool
    batched_grad_copy: bool
    skip_unused_buckets: bool
    precision: _C.Precision
    lazy_bucket_allocation: bool
