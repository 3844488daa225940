"""Where KV cache bytes are, and how they get from one cache into another: geometry and planning.

Usable by itself. Imports numpy, and numba for the loops of planning; moves no bytes, opens no sockets, knows no vLLM.
Its public modules:

    geometry        a worker's cache as data: strided planes over (layer, block, head, token, content)
    regions         registered memory, against which many addresses are checked at once
    copies          descriptor arrays: which bytes go where
    sharding        which rank holds which heads and layers, and from whom a rank reads them
    compatibility   what two engines must agree on
    plan            how blocks of one rank become blocks of another, as descriptors
    conversion      what a plan converts, in one line for people
    cost            what reads and copies cost, by which they are planned
    staging         fewer, wider reads into a buffer, and the copies that finish them
    host_blocks     where a block lies in host memory
    cross_layer     buffers that hold all layers of a block together
    checksums       checksums of cached tokens, comparable across any two geometries
"""

__all__ = [
    "checksums",
    "compatibility",
    "conversion",
    "copies",
    "cost",
    "cross_layer",
    "geometry",
    "host_blocks",
    "plan",
    "regions",
    "sharding",
    "staging",
]
