"""The suites, by name, in the order of docs/compatibility.md."""

from __future__ import annotations

from foreign.suite import Suite
from foreign.suites import (
    accelerate,
    composer,
    libraries,
    nvrx,
    torch_ddp,
    torch_replicate,
    torch_rpc,
    torchft,
    trainers,
)

_MODULES = (
    torch_ddp,
    torch_rpc,
    torch_replicate,
    torchft,
    accelerate,
    trainers,
    libraries,
    nvrx,
    composer,
)

SUITES: dict[str, Suite] = {module.SUITE.name: module.SUITE for module in _MODULES}
