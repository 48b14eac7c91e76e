"""Every text that a person can read of a command that was used wrongly."""

from __future__ import annotations


class UserMistake(Exception):
    """A command was used wrongly; told in one line, and the exit code is 2."""


def needs_tools(package: str) -> str:
    return f"this command needs {package}, which is not installed. Run: pip install {package}"


def tool_missing(package: str) -> UserMistake:
    return UserMistake(needs_tools(package))


def no_such_script(path: str) -> UserMistake:
    return UserMistake(f"there is no script {path!r}. Pass the path of a Python file.")


def no_such_file(path: object) -> UserMistake:
    return UserMistake(f"there is no file or folder '{path}'. Pass an existing path.")


def no_such_module(name: str) -> UserMistake:
    return UserMistake(
        f"there is no module {name!r} that can be imported from here. "
        "Pass the full name of the module, as for python -m."
    )


def only_python() -> UserMistake:
    return UserMistake(
        "--no-python and --run-path are not supported, because ddpx must run the script itself. "
        "Pass the path of a Python file, or -m and the name of a module."
    )


def bad_torchrun_options(message: str) -> UserMistake:
    return UserMistake(f"torchrun rejects the options: {message} (ddpx run --help has examples.)")


def cannot_launch(cause: Exception) -> UserMistake:
    return UserMistake(f"torchrun cannot start: {' '.join(str(cause).split())}")


def not_a_build_function(target: str) -> UserMistake:
    return UserMistake(
        f"{target!r} is not of the form module:function. "
        "Pass a module and its function that returns a model."
    )


def no_such_name(module: str, name: str) -> UserMistake:
    return UserMistake(
        f"module {module!r} has no function or class {name!r}. Check the part after the colon."
    )


def not_a_wrapper_class(target: str) -> UserMistake:
    return UserMistake(
        f"--class {target} does not name a wrapper class. Pass module:Class, a class that derives "
        "from torch.nn.Module and takes the arguments of DistributedDataParallel."
    )


def build_failed(target: str, cause: BaseException) -> UserMistake:
    return UserMistake(f"{target} raised {type(cause).__name__}: {' '.join(str(cause).split())}")


def built_no_module(target: str, value: object) -> UserMistake:
    return UserMistake(
        f"{target} returned an object of type {type(value).__name__}. Return a torch.nn.Module, or "
        "a pair of a module and an example input."
    )


def no_example_input(target: str) -> UserMistake:
    return UserMistake(
        f"{target} returned no example input. Return (module, example_input), or set "
        "module.example_input."
    )


def nothing_wrapped(script: str) -> UserMistake:
    return UserMistake(
        f"{script} wrapped no model in DistributedDataParallel. ddpx does not reach processes that "
        "the script starts itself, e.g. with mp.spawn."
    )


def wrapped_by_itself(script: str, wrapper: str) -> UserMistake:
    return UserMistake(
        f"{script} uses {wrapper} directly, so ddpx parity cannot run the script with DDP. Import "
        "DistributedDataParallel from torch.nn.parallel in the script. ddpx parity then replaces "
        f"DistributedDataParallel by {wrapper}."
    )
