"""The version of ddpx."""

__version__ = "0.1.0"
