"""Builds the extension in place. Prints one line on success, and the whole log on failure."""

from __future__ import annotations

import subprocess
import sys
import time


def main() -> int:
    print("building the C++ extension (2 to 6 minutes on 2 cores the first time) ...", flush=True)
    start = time.monotonic()
    build = subprocess.run(
        # csrc/objects.cmake expects the objects there.
        [sys.executable, "setup.py", "build_ext", "--inplace", "--build-temp", "build/objects"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if build.returncode != 0:
        print(build.stdout)
        print("the build failed; its log is above. A C++ compiler (g++ or clang++) is needed.")
        return build.returncode
    print(f"built in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
