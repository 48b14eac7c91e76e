"""torch's tests of DDP with RPC, for the agent TensorPipe, made as torch's CI makes them."""

from __future__ import annotations

from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed.ddp_under_dist_autograd_test import (
    DdpComparisonTest,
    DdpUnderDistAutogradTest,
)
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
    TensorPipeRpcAgentTestFixture,
)
from torch.testing._internal.distributed.rpc_utils import generate_tests

globals().update(
    generate_tests(
        "TensorPipe",
        TensorPipeRpcAgentTestFixture,
        [DdpUnderDistAutogradTest, DdpComparisonTest],  # type: ignore[type-abstract]
        __name__,
    )
)
del DdpComparisonTest, DdpUnderDistAutogradTest  # without an agent they are no tests

if __name__ == "__main__":
    run_tests()
