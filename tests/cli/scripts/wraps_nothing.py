"""A script without DDP."""

print("nothing to see")
