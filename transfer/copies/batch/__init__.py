"""Batched copies between host and device memory: descriptors in, a handle out. Start at ``backends.open_copier``."""
