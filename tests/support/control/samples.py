"""Sample messages of the control channel, and a handler that answers them and remembers what it was asked."""

import threading
from collections.abc import Callable
from typing import Any

import msgpack  # type: ignore[import-untyped]

from layout.geometry import CacheGroup, ModelIdentity, Plane, Region, WorkerGeometry
from transfer.control.messages import (
    Cancel,
    Cancelled,
    Checksummed,
    Checksums,
    Find,
    Follow,
    Followed,
    Found,
    Hello,
    InvalidReason,
    Locate,
    Located,
    Place,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Request,
    TransferState,
    Welcome,
)
from transfer.control.server import ControlServer

#: What the fixture ``start`` is: keys or None, and limits by name.
Start = Callable[..., ControlServer]

ENGINE = "engine-1"
SERVED_MODEL = ModelIdentity("LlamaForCausalLM", "c0ffee", "", 2, 4, 64, "bfloat16", "auto")


def geometry(tp_rank: int) -> WorkerGeometry:
    """One of two workers with two layers."""
    plane = Plane(
        part="kv",
        layers=("layers.0", "layers.1"),
        head_start=2 * tp_rank,
        heads=2,
        block_tokens=16,
        content=128,
        item_size=2,
        blocks=100,
        address=0x7F00_0000_0000 + tp_rank,
        layer_stride=8192,
        block_stride=16384,
        head_stride=4096,
        token_stride=256,
        content_stride=2,
    )
    return WorkerGeometry(
        tp_rank=tp_rank,
        tp_size=2,
        pp_rank=0,
        pp_size=1,
        engine_address=f"10.0.0.5:{15000 + tp_rank}",
        groups=(CacheGroup(16, 0, (plane,)),),
        regions=(Region(plane.address, 1 << 20),),
    )


HELLO = Hello(ENGINE)
RENEW = Renew(ENGINE, ("lease-1", "lease-2"))
RELEASE = Release(ENGINE, "lease-1", 0, 2, "pull", "contents")
CANCEL = Cancel(ENGINE, ("lease-1",))
FOLLOW = Follow("", "transfer-1", 0, 512, TransferState.COMPUTING, 2.0)
FOLLOWED = Followed(
    ENGINE, TransferState.COMPUTING, "lease-1", 30.0, 0, 3500, "00ff", (16, 16), 1024, ((7, 8), (0, 9)), (32, 32)
)
CHECKSUMS = Checksums(ENGINE, "lease-1", 1, 0, (0, 16, 69))
LOCATE = Locate(ENGINE, "lease-1")
LOCATED = Located(Place.HOST, ((3, -1, 7), (0, 2)))
FIND = Find("", "find-1", "sha256:00ff", 16, (b"\x00\xff" * 16, b"\x01" * 32), 17)
FOUND = Found(ENGINE, "sha256:00ff", 16, "", "lease-2", 30.0, 32, ((7, 8), (0, 9)), (16, 16), (("a",), ("b",)))
WELCOME = Welcome(ENGINE, SERVED_MODEL, (geometry(0), geometry(1)))

REQUESTS: tuple[Request, ...] = (HELLO, RENEW, RELEASE, CANCEL, FOLLOW, CHECKSUMS, LOCATE, FIND)
REPLIES: tuple[Reply, ...] = (
    WELCOME,
    Renewed(("lease-1",)),
    Released(False, InvalidReason.EXPIRED),
    Cancelled(),
    FOLLOWED,
    Checksummed((0, 7, 2**64 - 1)),
    LOCATED,
    FOUND,
)


class Handler:
    """Answers each request with the reply of its kind; a renew is answered with its own leases."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.answer: Callable[[Request], Reply] = self.usual
        self.thread: threading.Thread | None = None

    def handle(self, request: Request) -> Reply:
        self.asked.append(request)
        self.thread = threading.current_thread()
        return self.answer(request)

    @staticmethod
    def usual(request: Request) -> Reply:
        match request:
            case Hello():
                return WELCOME
            case Renew():
                return Renewed(request.lease_ids)
            case Release():
                return Released(True)
            case Cancel():
                return Cancelled()
            case Follow() | Find():
                return FOLLOWED if isinstance(request, Follow) else FOUND
            case Checksums() | Locate():
                return Checksummed((1,) * (len(request.borders) - 1)) if isinstance(request, Checksums) else LOCATED


def pack(message: Any) -> bytes:
    """MessagePack as the ``msgpack`` package writes it: the wire without this project's encoder."""
    frame: bytes = msgpack.packb(message)
    return frame


def unpack(frame: bytes) -> Any:
    """The reverse of ``pack``."""
    return msgpack.unpackb(frame)
