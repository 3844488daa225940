"""Geometry and planning: where KV cache bytes lie, and which of them to move from one cache into another.

Usable on its own. Imports numpy, and numba for the planning loops. Moves no bytes, opens no sockets, knows no vLLM.
Public modules:

    geometry        a worker's cache as data: strided planes over (layer, block, head, token, content)
    layer_numbers   what a loaded model's layers compute with, and how two engines' are compared
    regions         registered memory, and the check that addresses lie in it
    copies          descriptor arrays: which bytes go where
    context_parallel  which tokens of a request lie on which rank, where ranks share them
    sharding        which rank holds which heads and layers, and which ranks it reads them from
    compatibility   what two engines must agree on
    plan            how blocks of one rank become blocks of another, as descriptors
    conversion      a one-line summary of what a plan converts, for logs
    cost            the cost model of reads and copies
    staging         fewer, wider reads into a buffer, and the copies out of it
    block_objects   blocks as objects that engines of any tensor parallel size share
    host_blocks     where a block lies in host memory
    host_slots      host memory as a cache that can be read from and into
    states          which states of a request a block table has
    tails           which rows of a request's last blocks a pull leaves as they are
    scratch         a few blocks of a cache once more, in memory of their own
    checksums       checksums of cached tokens, comparable across any two geometries
"""
