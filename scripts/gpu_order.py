"""The order in which ``make gpu`` runs tests: the most valuable ones first."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from gpu_results import Results, State
from gpu_sources import digest_of_test

# Most valuable first. Two NCCL ranks are the smallest job that needs a reducer. One rank shows the
# streams and captures without peers. More ranks rarely find more. gloo copies through the host.
RANKS = ("nccl-2", "nccl-1", "nccl-3", "nccl-4", "gloo-2", "gloo-3", "gloo-8", "others")
# What the late device cannot show comes before all other tests, of any number of ranks.
FIRST = (
    "last_step",
    "device_shrink",
    "nccl_faults",
    "device_stalls",
    "device_graphs",
    "failed_captures",
    "test_examples",
)
# Wrong gradients are the worst defect, then a wait that is missing on a stream.
FILES = ("parity", "capture", "streams", "aborts", "usages")
# The sanitizer makes each operator slow, and more ranks have the same streams.
SANITIZED = ("nccl-1", "nccl-2")
# The sanitizer does not follow the replays of CUDA graphs, and it takes the address of each tensor,
# which a sparse tensor does not have. It reports errors in torch's compression hook, also with DDP.
NOT_SANITIZED = re.compile(
    r"device_graphs|captures|capture\.py|device_sparse|with_a_hook|communication_hooks\[\w+-fp16-"
)


def ranks_of(test: str) -> str:
    """The backend and the number of ranks of a test, such as "nccl-2", or "others"."""
    match = re.search(r"\bcuda-((?:nccl|gloo)-\d+)\b", test)
    return match[1] if match else "others"


def _value(test: str) -> tuple[bool, int, int, str]:
    ranks, file = ranks_of(test), test.partition("::")[0]
    is_first = any(name in file for name in FIRST)
    rank_index = RANKS.index(ranks) if ranks in RANKS else len(RANKS)
    file_index = next((i for i, name in enumerate(FILES) if name in file), len(FILES))
    return not is_first, rank_index, file_index, file


def sanitized(short: Iterable[str]) -> list[str]:
    """The tests that run under TORCH_CUDA_SANITIZER=1, of pytest's short selection."""
    return [
        test for test in short if ranks_of(test) in SANITIZED and not NOT_SANITIZED.search(test)
    ]


def in_order(
    tests: Iterable[str], results: Results, table: str, states: Collection[State]
) -> list[str]:
    """The tests whose results in a table are in one of these states, most valuable first."""
    chosen = [test for test in tests if results.state(table, test, digest_of_test(test)) in states]
    return sorted(chosen, key=_value)
