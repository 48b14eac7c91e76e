"""Process groups: the group of a wrapper, broadcasts of state, and the backend ``shm``."""
