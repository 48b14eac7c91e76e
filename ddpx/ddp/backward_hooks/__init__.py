"""Hooks of a backward: communication hooks, post-sync hooks, and optimizers."""
