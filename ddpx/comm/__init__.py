"""Process groups: which one a wrapper uses, broadcasts over it, and the backend ``shm``."""
