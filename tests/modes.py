"""The modes in which many tests train."""

from __future__ import annotations

from typing import Any

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
}
# DDP of torch 2.11 has no batched copy.
MODES_OF_DDPX = {**MODES, "batched": {"batched_grad_copy": True}}
