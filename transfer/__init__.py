"""Moves bytes between processes and speaks the control protocol. Knows memory, not vLLM."""
