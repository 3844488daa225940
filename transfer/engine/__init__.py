"""One-sided reads from a peer's memory: the contract in ``interface``, Mooncake and CUDA IPC behind it."""
