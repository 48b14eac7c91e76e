"""Adapters, which make trainer libraries use ReducerDDP.

Each library has a module: ``ddpx.integrations.lightning`` (Lightning and Fabric),
``ddpx.integrations.accelerate``, ``ddpx.integrations.transformers`` (Hugging Face Trainer) and
``ddpx.integrations.ray`` (Ray Train). A module requires its library. The page docs/trainers.md
compares the adapters.
"""
