"""What user code sets on a reducer after construction."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Settings:
    """Settings that a copy of a wrapper gives to its own reducer.

    Attributes:
        check_finite: Whether backward raises if a gradient is not finite.
        manual_finalization: Whether ``finalize_backward()`` ends a step.
        sample_rate: The number of steps between two reports. None: the default.
        sparse_rows: The rows in which sparse gradients have entries, by parameter name.
    """

    check_finite: bool = False
    manual_finalization: bool = False
    sample_rate: int | None = None
    sparse_rows: dict[str, torch.Tensor] = field(default_factory=dict)
