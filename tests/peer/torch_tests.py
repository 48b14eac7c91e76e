"""torch's own tests of DDP: imports them as they run here, and selects the relevant ones."""

from __future__ import annotations

import inspect
import os
import re
import unittest
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_WORLD_SIZE = 2
# Tests that request more than two GPUs. With two ranks they would skip half of their checks.
WORLD_SIZES = {
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd": 4,
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view": 4,
}

# Numbers in the source of tests that take too long on a CPU, and their replacements. This test runs
# a convolution net on images of 1000 x 1000, several hundred times.
_SMALLER: dict[str, dict[object, object]] = {"test_ddp_uneven_inputs": {1000: 50}}

# Decorators read it during the import of the module. Each rank sets its own value later.
_LARGEST_WORLD = 4
# torch's CI disables these tests as flaky or broken. Here a test counts only if it passes with
# torch's class, so they may run.
_LIFTED = re.compile(r"github\.com/pytorch|flak|internal CI", re.IGNORECASE)
_DDP = re.compile(r"DistributedDataParallel|nn\.parallel|\bDDP\b")


def load() -> ModuleType:
    """torch's module of distributed tests, for gloo, without skips for flaky tests."""
    os.environ["BACKEND"] = "gloo"
    os.environ["WORLD_SIZE"] = str(_LARGEST_WORLD)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    import unittest.case as case

    from torch.testing._internal import common_utils

    skip, skip_if = case.skip, common_utils.skip_but_pass_in_sandcastle_if

    def lifted_skip(reason: str) -> Callable[[F], F]:
        return _same if _LIFTED.search(str(reason)) else skip(reason)

    def lifted_skip_if(condition: Any, reason: str) -> Callable[[F], F]:
        return skip_if(condition and not _LIFTED.search(reason), reason)

    case.skip = unittest.skip = lifted_skip
    common_utils.skip_but_pass_in_sandcastle_if = lifted_skip_if
    common_utils.skip_but_pass_in_sandcastle = lambda reason: lifted_skip_if(True, reason)
    from torch.testing._internal.distributed import distributed_test

    # Ranks find each other by polling files. Ten seconds can be too short on a busy machine.
    sync: Any = distributed_test.Barrier.sync
    sync.__func__.__defaults__ = (None, 60)
    for name, numbers in _SMALLER.items():
        _replace_numbers(getattr(distributed_test.DistributedTest._DistTestBase, name), numbers)
    return distributed_test


def test_case(module: ModuleType) -> type[Any]:
    """A class with the tests of ``module``, like those of torch's own launcher."""

    class PeerTest(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        pass

    return PeerTest


def ddp_tests(module: ModuleType) -> list[str]:
    """Names of the tests that exercise DDP, in order of the source.

    These are tests whose source contains ``DistributedDataParallel``, ``DDP`` or ``nn.parallel``,
    or calls (in any number of steps) a method of the test class that does. The list may have too
    many tests. A test that constructs no wrapper is removed after its run.
    """
    methods = {
        name: inspect.unwrap(value)
        for name, value in vars(module.DistributedTest._DistTestBase).items()
        if inspect.isfunction(value)
    }
    sources = {name: inspect.getsource(method) for name, method in methods.items()}
    found = {name for name, source in sources.items() if _DDP.search(source)}
    while True:
        calls = {
            name
            for name, method in methods.items()
            if name not in found and found & _names_used(method)
        }
        if not calls:
            break
        found |= calls
    tests = [name for name in found if name.startswith("test_")]
    return sorted(tests, key=lambda name: methods[name].__code__.co_firstlineno)


def _names_used(function: Any) -> set[str]:
    """Attribute and global names in ``function``, including functions within it."""
    names: set[str] = set()
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        pending += [const for const in code.co_consts if inspect.iscode(const)]
    return names


def _replace_numbers(method: Any, numbers: dict[object, object]) -> None:
    function = inspect.unwrap(method)
    constants = tuple(
        numbers.get(const, const) if isinstance(const, int) else const
        for const in function.__code__.co_consts
    )
    function.__code__ = function.__code__.replace(co_consts=constants)


def _same(item: F) -> F:
    return item
