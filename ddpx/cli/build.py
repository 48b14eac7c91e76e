"""Models by name: ``module:function``."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from torch import nn

from ddpx.cli import errors


def build(target: str) -> tuple[nn.Module, Any]:
    """Calls the function that ``target`` names; its module is looked for in the working folder,
    too.

    Returns:
        The model and its example input: the second thing that the function returned, or the
        model's ``example_input``, or None.

    Raises:
        UserMistake: there is no such function, or it raised, or returned something else.
    """
    module_name, _, function_name = target.partition(":")
    if not module_name or not function_name:
        raise errors.not_a_build_function(target)
    function = _find(module_name, function_name)
    try:
        built = function()
    except Exception as cause:
        raise errors.build_failed(target, cause) from cause
    model, example = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module):
        raise errors.built_no_module(target, model)
    return model, getattr(model, "example_input", None) if example is None else example


def _find(module_name: str, function_name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as cause:
        if cause.name is not None and (module_name + ".").startswith(cause.name + "."):
            raise errors.no_such_module(module_name) from cause
        raise errors.build_failed(module_name, cause) from cause
    except Exception as cause:
        raise errors.build_failed(module_name, cause) from cause
    function = getattr(module, function_name, None)
    if not callable(function):
        raise errors.no_such_function(module_name, function_name)
    return function
