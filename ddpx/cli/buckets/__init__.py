"""``ddpx buckets``: shows the bucket plan of a model."""
