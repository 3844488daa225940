"""Moves bytes between processes and memories, and speaks the control protocol. Knows memory, not vLLM.

Usable by itself, with ``layout``. Its public packages and modules, none of which imports more than it needs:

    engine      one-sided reads from a peer's memory: the contract in ``base``, Mooncake (TCP, RDMA, Ascend)
    control     the protocol between decode and prefill engines, told in ``messages``: ``server``, ``client``, ``keys``
    batch_copy  batched copies between host and device memory: the contract in ``base``, the door in ``backends``
    local_copy  bytes that are here already: ``reshape``, ``reshape_torch`` for a device, ``checksums``
    memory      host memory: plain, pinned, or lent out in slots
    peers       addresses of peers, and which of them may be contacted
    errors      what every part may raise
"""

__all__ = ["batch_copy", "control", "engine", "errors", "local_copy", "memory", "peers"]
