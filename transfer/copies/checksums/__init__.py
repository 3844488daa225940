"""Reads what a cache holds: checksums of blocks, and values of tokens."""
