"""Virtual environments with torch, this checkout's ddpx, and the packages of a suite."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from foreign import BUILD, INSIDE, ROOT


@dataclass(frozen=True)
class Package:
    """A package that a suite needs.

    Attributes:
        name: The name for pip.
        version: The versions that count, such as ">=1.2". Default: any.
        needs: What pip installs besides. Default: nothing.
    """

    name: str
    version: str = ""
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Environment:
    """The environment of one suite.

    Attributes:
        python: The interpreter.
        folder: A folder for logs and results.
        versions: The versions of the packages that are installed.
        missing: The packages that cannot be installed, with the reason.
    """

    python: Path
    folder: Path
    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def site_packages(self) -> Path:
        return _site_packages(self.python)


def make(name: str, packages: Sequence[Package] | None, fresh: bool = False) -> Environment:
    """Returns the environment of a suite, and makes it if there is none with these packages.

    torch is installed first, and no package may replace it. ddpx is this checkout's, as built.
    Without a list of packages, the environment is .venv.

    Raises:
        RuntimeError: torch or pytest cannot be installed.
    """
    folder = BUILD / name
    if packages is None:
        return Environment(Path(sys.executable), folder)
    wanted = {"torch": version("torch"), "python": sys.version, "packages": repr(packages)}
    facts_file = folder / "installed.json"
    facts = json.loads(facts_file.read_text()) if facts_file.exists() else {}
    if fresh or facts.get("wanted") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        facts = {"wanted": wanted, **_install(folder, packages)}
        facts_file.write_text(json.dumps(facts, indent=1))
    environment = Environment(_python(folder), folder, facts["versions"], facts["missing"])
    _link_ddpx(environment.site_packages)
    return environment


def _install(folder: Path, packages: Sequence[Package]) -> dict[str, dict[str, str]]:
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    torch = f"torch=={version('torch').partition('+')[0]}"
    constraints = folder / "constraints.txt"
    constraints.write_text(f"{torch}\n")
    pip = [str(_python(folder)), "-m", "pip", "install", "--no-compile"]
    pip += ["--disable-pip-version-check", "--constraint", str(constraints)]
    for words in ([torch], ["numpy", "pytest", "pytest-timeout", "setuptools"]):
        if reason := _refusal(pip, words):
            raise RuntimeError(f"{', '.join(words)} cannot be installed: {reason}")
    missing = {}
    for package in packages:
        if reason := _refusal(pip, [package.name + package.version, *package.needs]):
            missing[package.name] = reason
    names = [package.name for package in packages if package.name not in missing]
    return {"versions": _versions(_python(folder), names), "missing": missing}


def _refusal(pip: list[str], words: list[str]) -> str:
    """Installs packages. Returns pip's reason if they cannot be installed, otherwise ""."""
    print(f"  pip install {' '.join(words)}", flush=True)
    done = subprocess.run(
        [*pip, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return ""
    return reason_in(done.stdout)


def reason_in(text: str) -> str:
    """The reason in pip's output why packages cannot be installed."""
    lines = [line.strip() for line in text.splitlines()]
    for index, line in enumerate(lines):
        if line == "The conflict is caused by:":
            return "; ".join(lines[index + 1 : index + 3])
    errors = [line for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or [""])[0].removeprefix("ERROR: ")


def _versions(python: Path, names: list[str]) -> dict[str, str]:
    code = (
        "import json, sys; from importlib.metadata import version;"
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    done = subprocess.run(
        [python, "-c", code, *names], stdout=subprocess.PIPE, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def _python(folder: Path) -> Path:
    return folder / "env" / "bin" / "python"


def _site_packages(python: Path) -> Path:
    (folder,) = (python.parent.parent / "lib").glob("python3*/site-packages")
    return folder


def _link_ddpx(site_packages: Path) -> None:
    """Makes ddpx and the modules of ``inside/`` importable.

    Links, so that the environment always has the checkout's build, and none of its other folders.
    """
    sources = [ROOT / "ddpx", *INSIDE.glob("*.py")]
    for source in sources:
        link = site_packages / source.name
        link.unlink(missing_ok=True)
        link.symlink_to(source)
    (site_packages / "foreign_start.pth").write_text("import foreign_start\n")
