"""The arguments of a constructor: options, checks, and what must be equal on all ranks."""
