"""Writes requirements.lock: the version of each package in this environment, for `pip -c`.

    make lock

To update: delete .venv and requirements.lock, then `make setup lock`.
"""

from __future__ import annotations

import sys
from importlib.metadata import distributions
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
NOT_LOCKED = {"ddpx", "pip"}
OLDEST_PYTHON = (3, 10)


def line(name: str, version: str, requires_python: str) -> str:
    """A constraint.

    On Python versions that the package version does not support, pip chooses another.
    """
    supported = SpecifierSet(requires_python)
    constraint = f"{name}=={Version(version).public}"
    for minor in range(OLDEST_PYTHON[1], sys.version_info.minor + 1):
        if f"3.{minor}.99" in supported:
            oldest = minor > OLDEST_PYTHON[1]
            return f'{constraint} ; python_version >= "3.{minor}"' if oldest else constraint
    raise RuntimeError(f"{name} {version} does not support this Python")


def main() -> int:
    found = {
        dist.metadata["Name"].lower().replace("_", "-"): line(
            dist.metadata["Name"],
            dist.version,
            dist.metadata.get("Requires-Python", ""),  # type: ignore[attr-defined]
        )
        for dist in distributions()
        if dist.metadata["Name"] not in NOT_LOCKED
    }
    text = "\n".join(constraint for _, constraint in sorted(found.items()))
    LOCK.write_text(f"# Constraints for pip, by `make lock`.\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
