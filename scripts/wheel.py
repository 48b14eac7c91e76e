"""Builds sdist and wheel into dist/, and tries each in an environment of its own.

    make wheel

Each package is installed beside torch alone, into a fresh virtual environment outside the
checkout. There it has to pass scripts/smoke.py, in an empty folder.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"


def run(*command: object, cwd: Path = ROOT) -> None:
    """RuntimeError with what the command printed, if it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        text = " ".join(str(word) for word in command)
        raise RuntimeError(f"{text}\nexited with {done.returncode}:\n{done.stdout}")


def build() -> Sequence[Path]:
    """The sdist, and the wheel that is built from it."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST)
    packages = [*DIST.glob("*.tar.gz"), *DIST.glob("*.whl")]
    if len(packages) != 2:
        raise RuntimeError(f"expected an sdist and a wheel in {DIST}, found {packages}")
    return packages


def try_out(package: Path) -> None:
    """Installs the package into an empty environment, and runs the smoke tests there."""
    with tempfile.TemporaryDirectory(prefix="ddpx-wheel-") as folder:
        environment, elsewhere = Path(folder) / "env", Path(folder) / "elsewhere"
        elsewhere.mkdir()
        run(sys.executable, "-m", "venv", environment)
        python = environment / "bin" / "python"
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*pip, f"torch=={version('torch').split('+')[0]}", "setuptools", "wheel", "ninja")
        run(*pip, "--no-build-isolation", package, cwd=elsewhere)
        run(
            python,
            "-P" if sys.version_info >= (3, 11) else "-s",
            ROOT / "scripts" / "smoke.py",
            cwd=elsewhere,
        )


def main() -> int:
    start = time.monotonic()
    try:
        for package in build():
            try_out(package)
            print(f"{package.relative_to(ROOT)}: passes ({time.monotonic() - start:.0f} s)")
    except RuntimeError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
