"""One-sided reads from a peer's memory: the transfer engine's contract in ``interface``, Mooncake and CUDA IPC behind it."""
