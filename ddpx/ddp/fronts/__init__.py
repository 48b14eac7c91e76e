"""The fronts of a replica: the steps of a forward, construction, and lookup in a model."""
