"""Moves bytes between processes and memories, and speaks the control protocol. Knows memory, not vLLM.

Usable on its own, together with ``layout``. Public packages and modules, each importing only what it needs:

    engine      one-sided reads from a peer's memory: the contract in ``base``, Mooncake (TCP, RDMA, Ascend)
    control     the protocol between decode and prefill engines (see ``messages``): ``server``, ``client``, ``keys``
    batch_copy  batched copies between host and device memory: the contract in ``base``, the entry point ``backends``
    local_copy  work on bytes in local memory: ``reshape``, ``reshape_torch`` for a device, ``checksums``
    memory      host memory: plain, pinned, or lent out in slots
    numa        the NUMA node of memory: named, and asked for
    peers       addresses of peers, and which of them may be contacted
    errors      exceptions that all parts share
"""

__all__ = ["batch_copy", "control", "engine", "errors", "local_copy", "memory", "numa", "peers"]
