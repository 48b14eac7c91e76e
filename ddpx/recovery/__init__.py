"""Going on after ranks were lost, with those that are left and without a restart."""

from ddpx.recovery.shrink import Shrunk, shrink

__all__ = ["Shrunk", "shrink"]
