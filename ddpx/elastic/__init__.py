"""Training continues on the surviving ranks after a failure, without a restart."""

from ddpx.elastic.shrink import Shrunk, shrink

__all__ = ["Shrunk", "shrink"]
