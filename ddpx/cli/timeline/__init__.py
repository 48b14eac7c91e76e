"""``ddpx timeline``: records the steps of a script."""
