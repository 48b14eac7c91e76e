"""DDP's names that only drive torch's own reducer.

The use of such a name is an error. A derived class that overrides such a name is refused when it is
instantiated, because ReducerDDP would never call the method.
"""

from __future__ import annotations

import inspect

from ddpx.reducer.torch_only import only_for_torch, refuse

# What to do instead, by name.
OF_WRAPPER = {
    "_clear_grad_buffer": "The delayed parameters have a bucket of the reducer.",
    "_ddp_init_helper": "The constructor of ReducerDDP makes the reducer.",
    "_delayed_all_reduce_hook": "The delayed parameters have a bucket of the reducer.",
    "_fire_reducer_autograd_hook": "Hooks on the parameters call the reducer of ddpx.",
    "_match_all_reduce_for_bwd_pass": "A rank without inputs uses model.join().",
    "_match_unused_params_allreduce": "A rank without inputs uses model.join().",
    "_module_wait_for_copy_hook": "Pass mixed_precision= to the wrapper.",
    "_register_accum_grad_hook": "Hooks on the parameters call the reducer of ddpx.",
    "_register_delay_all_reduce_hook": "Pass delay_all_reduce_named_params= to the wrapper.",
    "_root_copy_hook": "Pass mixed_precision= to the wrapper.",
}
# Attributes that describe memory or plans of torch's own reducer.
ATTRIBUTES_OF_WRAPPER = {
    "_bucket_config": "Read model.bucket_bytes_cap and model.bucket_bytes_cap_list.",
    "_delay_grad_buffer": "The delayed parameters have a bucket of the reducer.",
    "_delay_grad_views": "Read param.grad of the delayed parameters.",
}
# ReducerDDP has these methods, but never calls them.
_NEVER_CALLED = {
    "_log_and_throw": "Catch the errors of ReducerDDP, or read _get_ddp_logging_data()['error'].",
}


@refuse("model", OF_WRAPPER, ATTRIBUTES_OF_WRAPPER)
class TorchOnlyNames:
    """Names of DDP that raise NotImplementedError, with the name and the remedy."""


def check_overrides(cls: type, base: type) -> None:
    """Checks that ``cls`` overrides no method of ``base`` that ``base`` never calls.

    Raises:
        NotImplementedError: The class overrides such a method.
    """
    if cls is base:
        return
    for name, remedy in {**OF_WRAPPER, **ATTRIBUTES_OF_WRAPPER, **_NEVER_CALLED}.items():
        if inspect.getattr_static(cls, name) is not inspect.getattr_static(base, name):
            raise only_for_torch(f"{cls.__name__}.{name}", remedy)
