"""Prints what CMake needs to build against the installed torch, as ``KEY=value;value`` lines.

The values come from torch itself: the flags with which ``BuildExtension`` would compile an
extension. CMake thus builds as ``setup.py`` does.
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
import sysconfig
import tempfile

from setuptools import Distribution
from torch.utils import cpp_extension


class FlagsKnown(Exception):
    """Ends a build at the start of the compiler. The arguments are the flags."""


class ProbeBuild(cpp_extension.BuildExtension):
    """A build that stops when it knows the flags of its first source."""

    def build_extensions(self) -> None:
        # distutils calls _compile once per source, and BuildExtension wraps it to add its flags.
        self.compiler._compile = self.report_flags
        super().build_extensions()

    def report_flags(
        self, obj: str, src: str, ext: str, cc_args: object, flags: list[str], pp_opts: object
    ) -> None:
        raise FlagsKnown(*flags)


def extension_flags() -> list[str]:
    """Return the compiler flags that torch adds to those of an extension."""
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "probe.cpp")
        source.touch()
        extension = cpp_extension.CppExtension(
            "probe", [str(source)], extra_compile_args={"cxx": []}
        )
        build = ProbeBuild(Distribution({"ext_modules": [extension]}), use_ninja=False)
        build.build_lib = build.build_temp = folder
        build.ensure_finalized()
        # setuptools prints its progress to stdout, which is reserved for our lines.
        with contextlib.redirect_stdout(sys.stderr):
            try:
                build.run()
            except FlagsKnown as known:
                return list(known.args)
    raise RuntimeError("torch's BuildExtension compiled nothing, so its flags are not known")


def torch_config() -> dict[str, list[str]]:
    """Return the values of each key."""
    flags = extension_flags()
    libraries: list[str] = cpp_extension.CppExtension("probe", []).libraries
    of_the_module = ("-DTORCH_EXTENSION_NAME=", "-DTORCH_API_INCLUDE_EXTENSION_H")
    return {
        "CXX_STANDARD": [f.removeprefix("-std=c++") for f in flags if f.startswith("-std=c++")],
        # If torch was built without libstdc++'s new ABI, one of these flags says so.
        "DEFINITIONS": [
            f.removeprefix("-D")
            for f in flags
            if f.startswith("-D") and not f.startswith(of_the_module)
        ],
        "INCLUDE_DIRS": cpp_extension.include_paths(),
        "LIBRARY_DIRS": cpp_extension.library_paths(),
        # libtorch_python needs an interpreter, so only a Python module links to it.
        "LIBRARIES": [name for name in libraries if name != "torch_python"],
        "PYTHON_INCLUDE_DIRS": [sysconfig.get_path("include")],
        "PYTHON_MODULE_SUFFIX": [sysconfig.get_config_var("EXT_SUFFIX")],
    }


def main() -> None:
    for key, values in torch_config().items():
        print(f"{key}={';'.join(values)}")


if __name__ == "__main__":
    main()
