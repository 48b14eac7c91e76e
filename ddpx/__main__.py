"""``python -m ddpx``: the command line."""

from ddpx.cli import main

main()
