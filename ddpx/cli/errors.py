"""Every text that a person can read of a command that was used wrongly."""

from __future__ import annotations


class UserMistake(Exception):
    """A command was used wrongly; told in one line, and the exit code is 2."""


def needs_tools(package: str) -> str:
    return f"this needs {package}, which is not installed: pip install {package}"


def tool_missing(package: str) -> UserMistake:
    return UserMistake(needs_tools(package))


def no_such_script(path: str) -> UserMistake:
    return UserMistake(f"there is no script {path!r}. Pass the path of a Python file.")


def no_such_file(path: object) -> UserMistake:
    return UserMistake(f"there is no file or folder '{path}'.")


def no_such_module(name: str) -> UserMistake:
    return UserMistake(
        f"there is no module {name!r} to import from here. Give its full name, as for python -m."
    )


def only_python() -> UserMistake:
    return UserMistake("--no-python and --run-path leave no place to put ReducerDDP into a script.")


def bad_torchrun_options(message: str) -> UserMistake:
    return UserMistake(f"torchrun says: {message} (ddpx run --help has examples.)")


def cannot_launch(cause: Exception) -> UserMistake:
    return UserMistake(f"torchrun cannot start: {' '.join(str(cause).split())}")


def not_a_build_function(target: str) -> UserMistake:
    return UserMistake(
        f"{target!r} is not of the form module:function, with a function that returns a model."
    )


def no_such_name(module: str, name: str) -> UserMistake:
    return UserMistake(f"module {module!r} has no function or class {name!r}.")


def not_a_wrapper_class(target: str) -> UserMistake:
    return UserMistake(
        f"--class {target}: it has to name a class, as module:Class, that derives from "
        "torch.nn.Module and takes the arguments of DistributedDataParallel."
    )


def build_failed(target: str, cause: BaseException) -> UserMistake:
    return UserMistake(f"{target} raised {type(cause).__name__}: {' '.join(str(cause).split())}")


def built_no_module(target: str, value: object) -> UserMistake:
    return UserMistake(
        f"{target} returned a {type(value).__name__}. It has to return a torch.nn.Module, or a "
        "module and an example input."
    )


def no_example_input(target: str) -> UserMistake:
    return UserMistake(
        f"{target} gave no example input. Return (module, example_input), or set "
        "module.example_input."
    )


def nothing_wrapped(script: str) -> UserMistake:
    return UserMistake(
        f"{script} wrapped no model in DistributedDataParallel. (Processes that it starts by "
        "itself, as with mp.spawn, are not reached.)"
    )


def wrapped_by_itself(script: str, wrapper: str) -> UserMistake:
    return UserMistake(
        f"{script} uses {wrapper} by itself, so that DDP cannot be run for comparison. Import "
        f"DistributedDataParallel from torch.nn.parallel there: ddpx parity puts {wrapper} in its "
        "place."
    )
