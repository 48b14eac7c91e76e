"""Names of DDP that only drive torch's own reducer or logger. Their use here is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar

T = TypeVar("T")
_NONE: Mapping[str, str] = {}

# What to do instead, by method of DDP's reducer.
OF_REDUCER = {
    "_autograd_hook": "Hooks on the parameters call the reducer of ddpx.",
    "_delay_all_reduce": "Pass static_graph=True, which includes this step.",
    "_get_zeros_like_grad_buckets": "A rank without inputs uses model.join().",
    "_push_all_rebuilt_params": "A rank without inputs uses model.join().",
    "_reset_state": "Call model.reset().",
    "_run_comm_hook": "Call the communication hook itself.",
    "_set_forward_pass_work_handle": "Use model.join(divide_by_initial_world_size=False).",
    "_set_mixed_precision_param_dtype": "Pass mixed_precision= to the wrapper.",
    "_set_optimizer_in_backward": "Call model._register_fused_optim().",
    "get_backward_stats": "Call model._get_ddp_logging_data().",
    "set_logger": "Call model._get_ddp_logging_data().",
}


def refuse(
    place: str, methods: Mapping[str, str], attributes: Mapping[str, str] = _NONE
) -> Callable[[type[T]], type[T]]:
    """Adds names to a class whose use raises NotImplementedError, with the name and the remedy.

    Args:
        place: How scripts reach an instance, for example ``model.reducer``.
        methods: What to do instead, by name. A call or an assignment raises.
        attributes: The same for attributes. Reading raises, too.
    """

    def add(cls: type[T]) -> type[T]:
        for name, remedy in methods.items():
            setattr(cls, name, _refused(f"{place}.{name}", remedy, is_method=True))
        for name, remedy in attributes.items():
            setattr(cls, name, _refused(f"{place}.{name}", remedy, is_method=False))
        return cls

    return add


def _refused(name: str, remedy: str, is_method: bool) -> property:
    def use(*args: object, **kwargs: object) -> NoReturn:
        raise only_for_torch(name, remedy)

    get = (lambda self: use) if is_method else use
    return property(get, use, doc=f"Only torch's own reducer has this step. {remedy}")


def only_for_torch(name: str, remedy: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} is a step of torch's own reducer or logger, which ReducerDDP does not use. "
        f"{remedy}"
    )
