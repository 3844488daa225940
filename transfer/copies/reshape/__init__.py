"""Copies that reshape what has arrived, on the CPU or by a device's operators."""
