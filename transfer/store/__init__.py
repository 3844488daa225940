"""A pool of objects that engines share: the contract in ``interface``, Mooncake Store behind it."""
