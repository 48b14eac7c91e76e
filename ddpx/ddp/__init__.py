"""The two ways to average gradients: the wrapper ``ReducerDDP``, and ``replicate`` without one."""
