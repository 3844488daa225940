"""Moves bytes between processes and memories, and speaks the control protocol. Knows memory, not vLLM.

Usable on its own, together with ``layout``. Public packages and modules, each importing only what it needs:

    engine   one-sided reads from a peer's memory: the contract in ``interface``, Mooncake (TCP, RDMA, Ascend), CUDA IPC
    control  the protocol between decode and prefill engines (see ``messages``): ``server``, ``client``, ``keys``
    store    a pool of objects that engines share: the contract in ``interface``, Mooncake Store behind it
    copies   work on bytes in local memory: ``batch`` between host and device, ``reshape``, ``checksums``
    memory   host memory: plain, pinned, or lent out in slots
    numa     the NUMA node of memory: named, and asked for
    peers    addresses of peers, and which of them may be contacted
    threads  whether the system has some left
    errors   exceptions that all parts share
"""
