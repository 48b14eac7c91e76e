"""A library that imports DDP itself."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel as WhateverItIsCalled


def wrap(module: nn.Module) -> nn.Module:
    return WhateverItIsCalled(module)


def unwrap(model: nn.Module) -> nn.Module:
    assert isinstance(model, WhateverItIsCalled)
    return model.module
