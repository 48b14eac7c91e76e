"""The module whose gradients are averaged: layers, casts, inputs and outputs."""
