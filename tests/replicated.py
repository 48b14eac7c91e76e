"""A replicated module with the names of a wrapper, for tests that train any wrapper."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

import ddpx

# The function of ddpx in the place of each method of a wrapper. Functions with the method's own
# name are not listed.
FUNCTIONS = {
    "_get_ddp_logging_data": "logging_data",
    "_register_buffer_comm_hook": "register_buffer_comm_hook",
    "_register_builtin_comm_hook": "register_builtin_comm_hook",
    "_register_fused_optim": "register_fused_optim",
    "_set_ddp_runtime_logging_sample_rate": "set_logging_sample_rate",
    "_set_sparse_metadata": "set_sparse_metadata",
    "_set_static_graph": "set_static_graph",
    "_update_process_group": "update_process_group",
}


class Replicated(nn.Module):
    """Calls a module that ddpx.replicate() averages. Methods of a wrapper are functions of ddpx."""

    _get_active_ddp_module = ddpx.ReducerDDP._get_active_ddp_module
    _set_params_and_buffers_to_ignore_for_model = staticmethod(
        ddpx.ReducerDDP._set_params_and_buffers_to_ignore_for_model
    )

    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__()
        names = module.state_dict().keys()
        kind, attributes = type(module), set(vars(module))
        self.module = ddpx.replicate(module, *args, **options)
        assert self.module is module
        assert (type(module), set(vars(module))) == (kind, attributes)
        assert module.state_dict().keys() == names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("_parameters", "_buffers", "_modules", "module"):
            return super().__getattr__(name)
        function = getattr(ddpx, FUNCTIONS.get(name, name), None)
        if callable(function):
            return lambda *args, **kwargs: function(self.module, *args, **kwargs)
        return getattr(ddpx.as_ddp(self.module), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "require_backward_grad_sync":
            ddpx.set_requires_gradient_sync(self.module, value)
        elif name == "require_manual_backward_finalization":
            ddpx.set_manual_finalization(self.module, value)
        elif name == "_join_config":
            ddpx.as_ddp(self.module)._join_config = value
        else:
            super().__setattr__(name, value)

    @property
    def process_group(self) -> dist.ProcessGroup:
        return ddpx.process_group(self.module)
