"""Builds and runs tests under sanitizers. Fails on any finding.

    make sanitize                           all parts
    python scripts/sanitize.py core fuzz    some parts

core    the C++ tests, under AddressSanitizer (with leaks) and UndefinedBehaviorSanitizer
threads the same tests under ThreadSanitizer (torch itself is not instrumented)
suites  tests/torch_free, the tests without torch, under all three sanitizers
fuzz    random calls of the bindings, with an extension built under AddressSanitizer
leaks   tests/robustness: leaks of memory, fds, threads and processes, fuzz, bad input

The first builds take some minutes. Later builds compile only changed files.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build-asan"
BUILD_OF_THREADS = ROOT / "build-tsan"
FUZZ_SEEDS = (1, 2, 3)
FUZZ_EXAMPLES = 300

OPTIONS = {
    # Leaks are errors: LeakSanitizer finds none at exit in torch and its libraries.
    "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
# Leaks are not checked within Python, since the interpreter and its modules keep much until the
# end. tests/robustness tests leaks there. Too large allocations must fail as without sanitizers.
OPTIONS_IN_PYTHON = {
    **OPTIONS,
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
}


def run(*command: object, env: dict[str, str] | None = None) -> str:
    """The output of a command. Raises RuntimeError with the output if the command fails."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        text = " ".join(str(part) for part in command)
        raise RuntimeError(f"{text}\nexited with {done.returncode}:\n{done.stdout}")
    return done.stdout


def tool(name: str) -> str:
    """The path of a program, preferably from this interpreter's environment."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} was not found. Run: pip install {name}")
    return found


def build(target: str, folder: Path = BUILD, sanitizers: str = "address,undefined") -> None:
    run(
        tool("cmake"),
        *("-S", ROOT, "-B", folder, "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DDDPX_SANITIZE={sanitizers}",
    )
    run(tool("cmake"), "--build", folder, "--target", target)


def core() -> None:
    build("ddpx_tests")
    run(BUILD / "ddpx_tests", "--gtest_brief=1", env=OPTIONS)


def threads() -> None:
    build("ddpx_tests", BUILD_OF_THREADS, "thread")
    # The sanitizer does not see the locks of OpenMP.
    run(BUILD_OF_THREADS / "ddpx_tests", "--gtest_brief=1", env={"OMP_NUM_THREADS": "1"})


def suites() -> None:
    output = run(sys.executable, "-m", "pytest", "-q", "-rs", "tests/torch_free")
    if "SKIPPED" in output:
        raise RuntimeError(f"some tests did not run:\n{output}")


def fuzz() -> None:
    build("_C")
    env = {
        **OPTIONS_IN_PYTHON,
        "PYTHONPATH": str(_package_with(next(BUILD.glob("_C*.so")))),
        # Python is not instrumented, so the sanitizer's runtime must be loaded first. So must the
        # library of the exceptions that the runtime intercepts.
        "LD_PRELOAD": f"{_library('libasan.so')} {_library('libstdc++.so.6')}",
    }
    program = ROOT / "tests" / "robustness" / "fuzz_bindings.py"
    for seed in FUZZ_SEEDS:
        with tempfile.TemporaryDirectory() as directory:
            log = Path(directory) / "calls"
            numbers = (f"--seed={seed}", f"--examples={FUZZ_EXAMPLES}", f"--log={log}")
            try:
                run(sys.executable, program, *numbers, env=env)
            except RuntimeError as error:
                raise RuntimeError(
                    f"{error}\nthe calls, the last at fault:\n{log.read_text()}"
                ) from None


def leaks() -> None:
    run(sys.executable, "-m", "pytest", "-q", "tests/robustness")


def _package_with(extension: Path) -> Path:
    """A directory in which ``ddpx`` is this checkout with another extension."""
    package = BUILD / "python" / "ddpx"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    for entry in (ROOT / "ddpx").iterdir():
        if entry.suffix != ".so":
            (package / entry.name).symlink_to(entry)
    (package / extension.name).symlink_to(extension)
    return package.parent


def _library(name: str) -> str:
    """The path of a runtime library of the compiler."""
    compiler = os.environ.get("CXX", "g++")
    found = subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
    if not Path(found).is_absolute():
        raise RuntimeError(f"{compiler} does not find {name}. Install the sanitizer's runtime.")
    return found


PARTS: dict[str, Callable[[], None]] = {
    "core": core,
    "threads": threads,
    "suites": suites,
    "fuzz": fuzz,
    "leaks": leaks,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    failed = []
    for name in parser.parse_args().parts or PARTS:
        start = time.monotonic()
        print(f"{name} ...", flush=True)
        try:
            PARTS[name]()
        except RuntimeError as error:
            print(error)
            failed.append(name)
        took = time.monotonic() - start
        print(f"{name}: {'FAILED' if name in failed else 'no finding'} ({took:.0f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
