"""The module whose gradients are averaged: layers, buffers, casts, inputs and outputs."""
