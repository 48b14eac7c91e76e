"""The extension ``ddpx._C`` and its build command, for setup.py. Needs torch."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import units

# Not imported, because `import ddpx` loads the extension.
_VERSION = runpy.run_path(str(Path(__file__).resolve().parents[1] / "ddpx" / "version.py"))

try:
    import torch
    from torch.utils import cpp_extension
except ImportError:
    sys.exit(
        "ddpx must be built with the torch that it will run with, but torch is not installed.\n"
        f"Install torch first ({_VERSION['supported_torch']()}), then run: "
        "pip install --no-build-isolation ."
    )

if refusal := _VERSION["refusal_of"](torch.__version__):
    sys.exit(refusal)
if warning := _VERSION["warning_of"](torch.__version__):
    print(f"warning: {warning}", flush=True)

DEBUG = os.environ.get("DDPX_BUILD_DEBUG", "0") == "1"
SOURCES = [str(path) for path in sorted(Path("csrc").rglob("*.cpp"))]
HEADERS = [str(path) for path in sorted(Path("csrc").rglob("*.h"))]


class Build(cpp_extension.BuildExtension):
    """Compiles the sources in few units, and writes ``build.json`` for ``ddpx.build_info``."""

    def run(self) -> None:
        for extension in self.extensions:
            paths = (path for group in units.GROUPS for path in units.write_units(group))
            extension.sources = [os.path.relpath(path) for path in paths]
        super().run()
        command = [cpp_extension.get_cxx_compiler(), "--version"]
        facts = {
            "torch": torch.__version__,
            "compiler": subprocess.check_output(command, text=True).splitlines()[0],
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        }
        path = Path(self.get_ext_fullpath("ddpx._C")).with_name("build.json")
        path.write_text(json.dumps(facts, indent=2) + "\n")


EXTENSION = cpp_extension.CppExtension(
    name="ddpx._C",
    sources=SOURCES,  # for the sdist; the build replaces them by units
    depends=SOURCES + HEADERS,
    # Some compilers link libstdc++ statically. The extension then takes no function of libstdc++
    # from torch's libraries, which export some, and exports no function of its own copy.
    libraries=["stdc++"],  # before torch's
    extra_link_args=["-Wl,--exclude-libs,ALL"],
    # No include_dirs here: CppExtension then puts torch's own first, with the pybind11 of torch's
    # build. With another pybind11, a ProcessGroup cannot be passed to the extension.
    # torch 2.11 would choose C++17.
    extra_compile_args={"cxx": ["-std=c++20", *(["-O0", "-g"] if DEBUG else ["-O3", "-g0"])]},
)
