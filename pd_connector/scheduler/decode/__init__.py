"""The part of a decode engine: what to pull, from whom, and when."""
