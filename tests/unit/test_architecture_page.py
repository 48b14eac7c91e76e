"""docs/architecture.md is a map: it is short, and it has each folder of csrc/ and of ddpx/."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {".py", ".h"}
PAGE = (ROOT / "docs" / "architecture.md").read_text()


@pytest.mark.parametrize("folder", ["csrc", "ddpx"])
def test_each_folder_has_its_place(folder: str) -> None:
    (section,) = re.findall(rf"^## The [^\n]*`{folder}/`\n(.*?)^## ", PAGE, re.M | re.S)
    named = re.findall(r"^(?:\||-) `(\w+)/`(?:, `(\w+)/`)?", section, re.M)
    present = {path.parent.name for path in (ROOT / folder).glob("*/*") if path.suffix in SOURCES}
    assert {name for row in named for name in row if name} == present


@pytest.mark.parametrize("folder", ["csrc", "ddpx"])
def test_each_folder_has_tests(folder: str) -> None:
    (section,) = re.findall(r"^## Tests\n(.*?)^## ", PAGE, re.M | re.S)
    named = set(re.findall(rf"`{folder}/(\w+)/`", section))
    present = {path.parent.name for path in (ROOT / folder).glob("*/*") if path.suffix in SOURCES}
    assert named == present
    for tests in re.findall(r"`tests/(\w+)/`", section):
        assert (ROOT / "tests" / tests).is_dir(), tests


def test_the_map_is_short() -> None:
    assert PAGE.count("\n") <= 250
