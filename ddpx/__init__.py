"""ddpx: data-parallel training for PyTorch with its own gradient reducer.

``ReducerDDP`` takes the place of ``torch.nn.parallel.DistributedDataParallel``.
"""

import torch  # loads the libraries that the extension links to
import torch.distributed

if not torch.distributed.is_initialized():
    # The default arguments of this module hold the default group that exists at its import.
    # torch's optimizers import the module later. The group's threads would then outlive
    # destroy_process_group(), and a rank could abort while Python shuts down.
    import torch.distributed.nn.functional

from ddpx.build_info import check_build

check_build()

from ddpx.comm import shm
from ddpx.comm.shm import ShmOptions
from ddpx.ddp.fronts import dynamo
from ddpx.ddp.fronts.construction import call_on_construction
from ddpx.ddp.functions.ddp_methods import (
    as_ddp,
    finalize_backward,
    join,
    logging_data,
    no_sync,
    process_group,
    register_buffer_comm_hook,
    register_builtin_comm_hook,
    register_comm_hook,
    register_fused_optim,
    set_forward_sync_buffers,
    set_logging_sample_rate,
    set_manual_finalization,
    set_sparse_metadata,
    set_static_graph,
    should_finalize_after_backward,
    update_process_group,
    will_sync_module_buffers,
)
from ddpx.ddp.functions.extensions import (
    bucket_plan,
    plan_report,
    register_post_sync_hook,
    reset,
    set_check_finite,
    set_requires_gradient_sync,
    set_weight,
    synchronized_grads,
    wait_for_gradients,
)
from ddpx.ddp.module import ReducerDDP
from ddpx.ddp.replicate import replicate, unreplicate
from ddpx.elastic import Shrunk, shrink
from ddpx.health import (
    RankError,
    RankFailure,
    RankMismatch,
    RankStalled,
    peer_stack,
    peer_status,
    set_stall_timeout,
)
from ddpx.health.ending import publish_end
from ddpx.integrations.patch import Patch, patch_ddp
from ddpx.planning import BucketPlan, PlanReport
from ddpx.timeline import Timeline, record
from ddpx.timeline.environment import record_if_asked
from ddpx.version import __version__

dynamo.leave_alone(__name__)
shm.register()
publish_end()
call_on_construction(record_if_asked)

__all__ = [
    "BucketPlan",
    "Patch",
    "PlanReport",
    "RankError",
    "RankFailure",
    "RankMismatch",
    "RankStalled",
    "ReducerDDP",
    "ShmOptions",
    "Shrunk",
    "Timeline",
    "__version__",
    "as_ddp",
    "bucket_plan",
    "finalize_backward",
    "join",
    "logging_data",
    "no_sync",
    "patch_ddp",
    "peer_stack",
    "peer_status",
    "plan_report",
    "process_group",
    "record",
    "register_buffer_comm_hook",
    "register_builtin_comm_hook",
    "register_comm_hook",
    "register_fused_optim",
    "register_post_sync_hook",
    "replicate",
    "reset",
    "set_check_finite",
    "set_forward_sync_buffers",
    "set_logging_sample_rate",
    "set_manual_finalization",
    "set_requires_gradient_sync",
    "set_sparse_metadata",
    "set_stall_timeout",
    "set_static_graph",
    "set_weight",
    "should_finalize_after_backward",
    "shrink",
    "synchronized_grads",
    "unreplicate",
    "update_process_group",
    "wait_for_gradients",
    "will_sync_module_buffers",
]
