"""One read, three ends: the transfer engine's contract and its implementations."""
