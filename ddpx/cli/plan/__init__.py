"""``ddpx plan``: finds the fastest bucket plan of a script."""
