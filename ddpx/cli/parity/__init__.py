"""``ddpx parity``: trains with DDP and with ddpx, and compares the two trainings."""
