"""Functions for wrapped models, such as ``ddpx.no_sync(model)`` and ``ddpx.reset(model)``."""
