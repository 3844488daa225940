"""Copies of bytes in one machine: between host and device, within a device, and for checksums."""
