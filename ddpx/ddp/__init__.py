"""``ReducerDDP``: the wrapper around a module, and the parts that the wrapper consists of."""
