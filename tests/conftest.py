"""Fixtures and hooks that many test files share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import late_device
import plain_timeout
import pytest
from pairwise import NUMBERS_OF_RANKS, cover

from ddpx.testing import RankPool

# torch's stores ask name servers for the name of each client, including 127.0.0.1, and wait for the
# answer. The options shorten that wait from the resolver's default of 5 or 10 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Python processes that tests start run tests/startup/sitecustomize.py.
_STARTUP = str(Path(__file__).parent / "startup")
if _STARTUP not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (_STARTUP, os.environ.get("PYTHONPATH")))
    )

# Folders that run first: their tests compile, train with large libraries, or search for a given
# time. A worker that begins one of their files last runs long after the others have ended.
LONGEST = ("property", "cpp", "torch_free", "integrations")
# The number of cases of a test function from which on only a part of them runs (pairwise.py).
SMALL_MATRIX = 6


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """Called by pytest-xdist if it is installed."""
    from by_file import ByFile

    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption(
        "--full", action="store_true", help="whole matrices, of which otherwise a part is run"
    )
    parser.addoption(
        "--strength",
        type=int,
        default=2,
        help="1: a part of a matrix has each value, not each pair",
    )
    parser.addoption("--most-ranks", type=int, help="leave out cases with more ranks")
    if not pluginmanager.hasplugin("timeout"):
        plain_timeout.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        config.pluginmanager.register(plain_timeout)


def _is_whole(config: pytest.Config) -> bool:
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    return named or bool(config.getoption("--full"))


@pytest.fixture(scope="session")
def whole(pytestconfig: pytest.Config) -> bool:
    """Whether to run matrices in full. For matrices that are not params of pytest."""
    return _is_whole(pytestconfig)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Reduce large matrices, and put the longest files first.

    Matrices run in full with ``--full``, or if the command line names files.
    """
    items.sort(key=lambda item: item.path.parent.name not in LONGEST)
    most_ranks = config.getoption("--most-ranks")
    if most_ranks is not None:
        _keep(config, items, [item for item in items if _num_ranks(item) <= most_ranks])
    if _is_whole(config):
        return
    by_function: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("full_only"):
            continue
        by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    strength = config.getoption("--strength")
    parts = [_part(name, cases, strength) for name, cases in by_function.items()]
    _keep(config, items, [item for part in parts for item in part])


def _keep(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    """Deselects the items that are not kept. The others keep their order."""
    ids = set(map(id, kept))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in ids])
    items[:] = [item for item in items if id(item) in ids]


def _num_ranks(item: pytest.Item) -> int:
    """The number of ranks in the params of a test. 0 if the params do not tell."""
    callspec = getattr(item, "callspec", None)
    params = {} if callspec is None else callspec.params
    return max((params[name] for name in NUMBERS_OF_RANKS if name in params), default=0)


def _part(name: str, cases: list[pytest.Item], strength: int) -> list[pytest.Item]:
    if len(cases) < SMALL_MATRIX:
        return cases
    return [cases[index] for index in cover([_values(item) for item in cases], name, strength)]


def _values(item: pytest.Item) -> dict[str, str]:
    """The params of a test as texts. A number of ranks has the device with it."""
    params = item.callspec.params  # type: ignore[attr-defined]
    device = params.get("device", "")
    return {
        key: f"{device} {value!r}" if key in NUMBERS_OF_RANKS else repr(value)
        for key, value in params.items()
    }


@pytest.fixture(scope="session")
def late_library() -> None:
    """The late device is compiled.

    This happens before the first test, since tests have time limits.
    """


def pytest_collection_finish(session: pytest.Session) -> None:
    needed = any(
        "late_library" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("gpu")
        for item in session.items
    )
    if needed and not session.config.option.collectonly:
        late_device.build()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(n)`` returns a pool of n gloo ranks, the same one for all tests of a file.

    The threads of a gloo group wake a hundred times a second. So the groups that tests leave behind
    must not live longer than their file.
    """
    pools: dict[int, RankPool] = {}
    yield lambda world_size: pools.setdefault(world_size, RankPool(world_size))
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session", params=[2, 3])
def world(request: pytest.FixtureRequest) -> int:
    """The number of ranks. Tests are grouped by this number, so that ranks live on."""
    return int(request.param)
