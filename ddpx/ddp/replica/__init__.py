"""The replica of a module: all that ddpx keeps for one front."""
