"""Builds sdist and wheel into dist/, and tests each in an environment of its own.

    make wheel

Each package is installed into a new virtual environment outside the checkout, which has only torch.
There it must pass scripts/smoke.py, in an empty folder.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
# The folder of a script, or of -m, is not importable, so that ddpx is the installed one. Python
# 3.10 has no "-P" for this alone.
INSTALLED_ONLY = "-I"


def run(*command: object, cwd: Path = ROOT) -> str:
    """Runs a command and returns its output. Raises RuntimeError with the output if it fails."""
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
    return done.stdout


def build(*kinds: str) -> Sequence[Path]:
    """Packages in dist/: ``sdist`` or ``wheel``.

    By default both, with the wheel built from the sdist.
    """
    shutil.rmtree(DIST, ignore_errors=True)
    flags = [f"--{kind}" for kind in kinds]
    run(sys.executable, "-m", "build", "--no-isolation", *flags, "--outdir", DIST)
    packages = [*DIST.glob("*.tar.gz"), *DIST.glob("*.whl")]
    if len(packages) != (len(kinds) or 2):
        raise RuntimeError(f"unexpected packages in {DIST}: {packages}")
    return packages


@contextmanager
def installed(
    package: Path, torch: str, *others: str, extra: str = "", interpreter: str = sys.executable
) -> Iterator[tuple[Path, Path]]:
    """A new environment with torch, the package with an extra such as "[demo]", and others.

    The environment is made by ``interpreter``. Returns its Python and an empty folder.

    Raises:
        RuntimeError: Something could not be installed. The error has pip's output.
    """
    with tempfile.TemporaryDirectory(prefix="ddpx-packages-") as folder:
        environment, elsewhere = Path(folder) / "env", Path(folder) / "elsewhere"
        elsewhere.mkdir()
        package = Path(shutil.copy(package, folder))  # another command may build anew meanwhile
        run(interpreter, "-m", "venv", environment)
        python = environment / "bin" / "python"
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        # torch first, so that no requirement can install another version of it.
        run(*pip, f"torch=={torch}")
        run(*pip, "setuptools", "wheel", "ninja", *others)
        run(*pip, "--no-build-isolation", f"{package}{extra}", cwd=elsewhere)
        yield python, elsewhere


def try_out(package: Path) -> None:
    with installed(package, version("torch").split("+")[0]) as (python, elsewhere):
        run(python, INSTALLED_ONLY, ROOT / "scripts" / "smoke.py", cwd=elsewhere)


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
