"""The attributes and methods of DDP that each front has."""
