"""The part of host memory: which blocks are stored there, found there, and lent."""
