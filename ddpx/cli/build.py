"""Finds models and wrappers by name: ``module:function`` and ``module:Class``."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from torch import nn

from ddpx.cli import errors


def build(target: str) -> tuple[nn.Module, Any]:
    """Calls the function that ``target`` names. The module may be in the working folder.

    Returns:
        The model and its example input. The example input is the second value that the function
        returned, or the model's ``example_input``, or None.

    Raises:
        UserMistake: The function does not exist, raised, or returned another type.
    """
    module_name, _, function_name = target.partition(":")
    if not module_name or not function_name:
        raise errors.UserMistake(
            f"{target!r} is not of the form module:function. Pass a module and its function that "
            "returns a model."
        )
    function = _find(module_name, function_name)
    try:
        built = function()
    except (Exception, SystemExit) as cause:
        raise _build_failed(target, cause) from cause
    model, example = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module):
        raise errors.UserMistake(
            f"{target} returned an object of type {type(model).__name__}. Return a "
            "torch.nn.Module, or a pair of a module and an example input."
        )
    return model, getattr(model, "example_input", None) if example is None else example


def find_wrapper(target: str) -> type[nn.Module]:
    """Returns the class that ``target`` names. The module may be in the working folder.

    Raises:
        UserMistake: The class does not exist, or is not a torch.nn.Module.
    """
    module_name, _, class_name = target.partition(":")
    found = _find(module_name, class_name) if module_name and class_name else None
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        raise errors.UserMistake(
            f"--class {target} does not name a wrapper class. Pass module:Class, a class that "
            "derives from torch.nn.Module and takes the arguments of DistributedDataParallel."
        )
    return found


def _find(module_name: str, name: str) -> Any:
    if module_name.startswith("."):  # a path, or a relative name
        raise errors.no_such_module(module_name)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as cause:
        if cause.name is not None and (module_name + ".").startswith(cause.name + "."):
            raise errors.no_such_module(module_name) from cause
        raise _build_failed(module_name, cause) from cause
    except (Exception, SystemExit) as cause:
        raise _build_failed(module_name, cause) from cause
    found = getattr(module, name, None)
    if not callable(found):
        raise errors.UserMistake(
            f"module {module_name!r} has no function or class {name!r}. Check the part after the "
            "colon."
        )
    return found


# ---- errors --------------------------------------------------------------------------------------


def _build_failed(target: str, cause: BaseException) -> errors.UserMistake:
    return errors.UserMistake(
        f"{target} raised {type(cause).__name__}: {' '.join(str(cause).split())}"
    )
