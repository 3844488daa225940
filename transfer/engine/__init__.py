"""One-sided reads from a peer's memory: the transfer engine's contract in ``base``, and Mooncake behind it."""
