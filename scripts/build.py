"""Builds the extension in place. Prints the progress, and on failure the whole log."""

from __future__ import annotations

import re
import subprocess
import sys
import time

_OF_NINJA = re.compile(r"\[(\d+)/(\d+)\] ")
_WARNING = "warning: ddpx "  # of csrc/extension.py


def main() -> int:
    print("building the C++ extension (1 to 3 minutes on 2 idle cores the first time)", flush=True)
    start = time.monotonic()
    build = subprocess.Popen(
        # csrc/units.cmake expects the objects there.
        [sys.executable, "setup.py", "build_ext", "--inplace", "--build-temp", "build/objects"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert build.stdout is not None
    log = []
    for line in build.stdout:
        log.append(line)
        if progress := _OF_NINJA.match(line):
            print(f"compiled {progress[1]} of {progress[2]} files", flush=True)
        elif line.startswith(_WARNING):
            print(line, end="", flush=True)
    if code := build.wait():
        print("".join(log))
        print("the build failed; its log is above. A C++ compiler (g++ or clang++) is needed.")
        return code
    print(f"built in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
