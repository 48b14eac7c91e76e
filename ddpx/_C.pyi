"""The C++ core; bound in csrc/bindings/. tests/unit/test_stub.py checks this file against it."""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist

class Phase:
    """The phases of a reducer; docs/architecture.md draws them."""

    IDLE: ClassVar[Phase]
    REBUILDING: ClassVar[Phase]
    COLLECTING: ClassVar[Phase]
    DRAINING: ClassVar[Phase]
    FAILED: ClassVar[Phase]
    @property
    def name(self) -> str: ...

def transition(from_: Phase, to: Phase) -> Phase:
    """Returns ``to`` if a reducer may go there from ``from_``; RuntimeError naming both if not."""

class GraphMode:
    """What the reducer may assume of the autograd graph from step to step."""

    DEFAULT: ClassVar[GraphMode]
    FIND_UNUSED: ClassVar[GraphMode]
    STATIC: ClassVar[GraphMode]
    @property
    def name(self) -> str: ...

class ParamMeta:
    """What a bucket plan needs to know of a param."""

    def __init__(self, param: torch.Tensor, expect_sparse: bool = False) -> None: ...
    @property
    def numel(self) -> int: ...
    @property
    def element_bytes(self) -> int: ...
    @property
    def expect_sparse(self) -> bool: ...

class BucketCaps:
    """Bucket sizes in bytes; ``listed_bytes``, if not empty, goes bucket by bucket."""

    def __init__(
        self, first_bytes: int, cap_bytes: int, listed_bytes: Sequence[int] = ...
    ) -> None: ...
    @property
    def first_bytes(self) -> int: ...
    @property
    def cap_bytes(self) -> int: ...
    @property
    def listed_bytes(self) -> list[int]: ...

class BucketPlan:
    """Which gradient lies in which bucket, in launch order."""

    @staticmethod
    def initial(params: Sequence[ParamMeta], caps: BucketCaps, mode: GraphMode) -> BucketPlan: ...
    @staticmethod
    def by_arrival(
        params: Sequence[ParamMeta], caps: BucketCaps, arrival_order: Sequence[int]
    ) -> BucketPlan: ...
    @property
    def buckets(self) -> list[list[int]]:
        """Param indices of each bucket."""

class ReducerParam:
    """A param whose gradient is to be reduced."""

    def __init__(self, tensor: torch.Tensor, name: str, expect_sparse: bool = False) -> None: ...

class Reducer:
    """Packs gradients into buckets as they arrive and all-reduces them while backward runs."""

    def __init__(
        self,
        params: Sequence[ReducerParam],
        process_group: dist.ProcessGroup,
        caps: BucketCaps,
        mode: GraphMode,
        gradient_as_bucket_view: bool,
    ) -> None: ...
    def prepare_forward(self) -> bool:
        """At the start of a forward that records a graph; True if the buckets were rebuilt."""
    def watch_outputs(self, outputs: Sequence[torch.Tensor]) -> None:
        """With the outputs of forward: lets the reducer notice where a backward starts."""
    def remove_hooks(self) -> None:
        """Takes all hooks off the params."""
    @property
    def sync_enabled(self) -> bool:
        """Whether the next backward is synchronised."""
    @sync_enabled.setter
    def sync_enabled(self, value: bool) -> None: ...
    @property
    def phase(self) -> Phase: ...
    @property
    def plan(self) -> BucketPlan: ...
