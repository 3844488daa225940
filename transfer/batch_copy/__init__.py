"""Batched copies between host and device memory: descriptors in, a handle out. Begin with ``backends.open_copier``."""
