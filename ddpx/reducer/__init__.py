"""The C++ reducer, with a typed constructor and the names that DDP's reducer has."""

from ddpx.reducer.reducer import Reducer

__all__ = ["Reducer"]
