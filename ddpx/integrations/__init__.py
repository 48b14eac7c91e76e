"""ReducerDDP in trainers: one module a library, each imported by those who use that library.

``lightning`` (Lightning and Fabric), ``accelerate``, ``transformers`` (Hugging Face Trainer) and
``ray`` (Ray Train). docs/trainers.md shows how each is used.
"""
