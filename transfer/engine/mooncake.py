"""The transfer engine over Mooncake: its options, the memory that peers reach, and which kind of links it has.

On TCP the engine that peers reach is passive: it holds the registered memory and reads nothing. Every link has its own
Mooncake engine, with no memory registered. A peer that hangs, breaks its connection or restarts then harms only its own
link, and deleting that engine is the only way with Mooncake to be sure that no more bytes arrive. On RDMA and Ascend,
memory must be registered with the engine that reads into it, and connections are expensive. There all links share one
engine, and a failed read has settled once Mooncake's own counters say that each of its descriptors is final.

``mooncake_links`` has both kinds of links, ``mooncake_read`` runs one read, ``mooncake_batches`` knows how far a batch
is, ``mooncake_settling`` watches what failed reads leave behind, ``mooncake_native`` holds the calls into the library,
``mooncake_ports`` finds out why a peer is not reached, ``batches`` checks a batch, ``window`` shares among reads what
may be in flight.
"""

import difflib
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from layout.cost import CostModel
from layout.geometry import Identity, Region
from layout.regions import RegionTable, describe_region
from transfer.engine.batches import RegisteredMemory
from transfer.engine.identity import HostIdentityMemory, IdentityMemory, OwnIdentity, check_identity
from transfer.engine.interface import EngineStartError, GivenUp, ReadFailed, TransferEngine, never
from transfer.engine.mooncake_limits import LIMITS, Limits
from transfer.engine.mooncake_links import MooncakeLink, OwnEngineLink, SharedEngineLink
from transfer.engine.mooncake_native import NativeEngine, NativeOptions
from transfer.engine.mooncake_settling import Settling
from transfer.engine.rdma import INFINIBAND_DEVICES, VERBS_DEVICES, has_rdma_device, unknown_devices
from transfer.engine.window import Window
from transfer.memory import SlotPool
from transfer.peers import parse_address, parse_ip

PROTOCOLS = ("tcp", "rdma", "ascend")

#: Links that can read a peer's identity at once. Each needs memory for that, which is registered.
_IDENTITY_READS = 256

#: What an engine needs of ``IdentityMemory``: a page for its own number, and one for each of those reads.
IDENTITY_BYTES = (1 + _IDENTITY_READS) * mmap.PAGESIZE

_ASYNC = "ASCEND_USE_ASYNC_TRANSFER"

#: Held by the engine of this process on Ascend: CANN's engine under it belongs to the process and its device.
_ASCEND_ENGINE = threading.Lock()


@dataclass(frozen=True, slots=True)
class MooncakeOptions(NativeOptions):
    """Options of a Mooncake engine and its reads.

    Raises:
        EngineStartError: a value is out of range or unknown.
    """

    descriptors_per_call: int | None = None  # None: what suits the protocol
    max_descriptors_in_flight: int | None = None  # to one peer, over all threads; None: what suits the protocol
    longest_pause_s: float | None = None  # between two looks at a read; None: what suits the protocol
    cost: CostModel | None = None  # by which time in flight is predicted; None: the protocol's
    engine_per_link: bool | None = None  # whether each link has its own engine; None: only on TCP

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            near = difflib.get_close_matches(self.protocol.lower(), PROTOCOLS, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise EngineStartError(f"unknown protocol {self.protocol!r}; it must be {' or '.join(PROTOCOLS)}{hint}")
        self._check_host()
        limits, most = self.limits, LIMITS[self.protocol].most_in_flight
        if not 0 < limits.in_flight <= most:
            raise EngineStartError(
                f"max_descriptors_in_flight {limits.in_flight} must be from 1 to {most} with protocol {self.protocol!r}"
            )
        if not 0 < limits.per_call <= limits.in_flight:
            raise EngineStartError(
                f"descriptors_per_call {limits.per_call} must be from 1 to max_descriptors_in_flight {limits.in_flight}"
            )

    def _check_host(self) -> None:
        if not self.host or self.host in ("0.0.0.0", "::"):  # noqa: S104  refused, not bound
            raise EngineStartError(
                f"host {self.host!r} is not an address that a peer can reach: set host, or VLLM_HOST_IP, to that of a "
                "network interface of this machine. Without a default route, vLLM finds none by itself"
            )
        if self.host.startswith("[") or self.host.count(":") == 1:
            raise EngineStartError(f"host {self.host!r} must be without port and brackets: the OS chooses the port")
        if self.protocol == "ascend" and parse_ip(self.host) is None:
            raise EngineStartError(
                f"host {self.host!r}: CANN takes IP addresses only; set host, or VLLM_HOST_IP, to that of a network "
                "interface of this machine"
            )

    @property
    def isolated(self) -> bool:
        """Whether each link has its own engine."""
        return self.protocol == "tcp" if self.engine_per_link is None else self.engine_per_link

    @property
    def limits(self) -> Limits:
        """What suits the protocol, with what was set in its place. A call never exceeds what may be in flight."""
        suited = LIMITS[self.protocol]
        in_flight = suited.in_flight if self.max_descriptors_in_flight is None else self.max_descriptors_in_flight
        per_call = min(suited.per_call, in_flight) if self.descriptors_per_call is None else self.descriptors_per_call
        longest_s = suited.longest_pause_s if self.longest_pause_s is None else self.longest_pause_s
        shortest_s = min(suited.shortest_pause_s, longest_s)
        return replace(
            suited, per_call=per_call, in_flight=in_flight, shortest_pause_s=shortest_s, longest_pause_s=longest_s
        )

    @property
    def costs(self) -> CostModel:
        """What was set, or what suits the protocol."""
        return CostModel.of_protocol(self.protocol) if self.cost is None else self.cost


class MooncakeEngine(TransferEngine):
    """Owns a worker's memory as registered with Mooncake, and its links to peers.

    Safe to use from any thread: one lock guards the set of links, also of those that are being opened, and the windows.

    Raises:
        EngineStartError: Mooncake is not installed, or does not start with these options.
    """

    def __init__(
        self,
        options: MooncakeOptions,
        identities: IdentityMemory | None = None,
        lend: Callable[[str], Any] | None = None,
    ) -> None:
        """Start the engine.

        Args:
            options: see there.
            identities: ``IDENTITY_BYTES`` of memory that peers can read by this transport; None: host memory.
            lend: as of ``NativeEngine``; None: the engine is nobody else's.
        """
        if options.protocol == "rdma" and not has_rdma_device():
            raise EngineStartError(
                f"protocol is 'rdma', but there is no RDMA device with an active port in {INFINIBAND_DEVICES}, or none "
                f"that can be opened in {VERBS_DEVICES}: pass the devices into the container, or use protocol 'tcp'"
            )
        if options.protocol == "rdma" and (unknown := unknown_devices(options.devices)):
            raise EngineStartError(
                f"devices {options.devices!r}: {', '.join(unknown)} is not in {INFINIBAND_DEVICES}, and Mooncake would "
                "go on with the others; correct the name, or leave devices empty"
            )
        if options.protocol == "ascend" and (asked := os.environ.get(_ASYNC)) is not None:
            raise EngineStartError(
                f"{_ASYNC} is set (to {asked!r}; any value turns it on), but asynchronous transfers count as ended "
                "before their connection is, so bytes may land later than is known: unset it"
            )
        self.options = options
        self._lock = threading.Lock()
        self.memory = RegisteredMemory()
        self._links: set[MooncakeLink] = set()
        self._windows: weakref.WeakValueDictionary[str, Window] = weakref.WeakValueDictionary()
        self._closed = False
        self.identities = identities or HostIdentityMemory(IDENTITY_BYTES)
        pages = self.identities.region
        self._check_regions([pages])
        with ExitStack() as undo:
            if options.protocol == "ascend":
                if not _ASCEND_ENGINE.acquire(blocking=False):
                    raise EngineStartError(
                        "this process has a transfer engine with protocol 'ascend' already, and can have only one: "
                        "configure one PDConnector in MultiConnector, not several"
                    )
                undo.callback(_ASCEND_ENGINE.release)
            self.native = NativeEngine(options, lend)
            undo.callback(self.native.delete)
            self.settling = Settling(self.native)
            self._own = OwnIdentity(self.identities)
            self._link_kind: type[MooncakeLink] = OwnEngineLink if options.isolated else SharedEngineLink
            scratch = Region(pages.address + mmap.PAGESIZE, _IDENTITY_READS * mmap.PAGESIZE)
            self.scratch = SlotPool(scratch, _IDENTITY_READS, self.identities)
            self.native.register([pages if self._link_kind.reads_with_shared else self._own.region])
            self._release = undo.pop_all()

    @property
    def address(self) -> str:
        """Where peers reach this engine."""
        return self.native.address

    @property
    def identity(self) -> Identity:
        """See the contract."""
        return self._own.identity

    def register(self, regions: Sequence[Region]) -> None:
        """See the contract. Registers all ``regions`` or none. Holds the GIL, so use it at start-up only."""
        self._check_regions([self.identities.region, *self.memory.table.regions, *regions])
        self.memory.add(regions, self.native.register)

    def _check_regions(self, regions: Sequence[Region]) -> None:
        """Raise unless the transport can register all of ``regions`` together.

        Raises:
            EngineStartError: naming the value, the rule, and the way out.
        """
        limits, protocol = self.options.limits, self.options.protocol
        for region in regions:
            if past := region.address % limits.alignment:
                raise EngineStartError(
                    f"cannot register the {describe_region(region)}: it begins {past} bytes after a multiple of "
                    f"{limits.alignment} bytes, and with protocol {protocol!r} it must begin at one. vllm-ascend "
                    "aligns the KV caches of an engine that has a kv_transfer_config; please report a release that "
                    "does not"
                )
        if limits.most_regions is not None and len(regions) > limits.most_regions:
            raise EngineStartError(
                f"cannot register {len(regions)} regions of memory: with protocol {protocol!r} at most "
                f"{limits.most_regions} are possible. cross_layer_blocks needs one for each part of the cache instead "
                "of one for each layer (the log says why it is off); or use more pipeline stages, which hold fewer "
                "layers each"
            )

    def open(
        self, address: str, regions: Sequence[Region], identity: Identity | None = None, given_up: GivenUp = never
    ) -> MooncakeLink:
        """See the contract. The identity is read now, so that the first real read finds a warm link.

        On a shared engine, a peer is neither opened nor read while earlier reads from it have failed and not settled.
        It is ill, and more descriptors would only wait behind those.
        """
        try:
            parse_address(address)
            peer = RegionTable(regions)
        except ValueError as error:
            raise ReadFailed(f"cannot open a link to {address}: {error}", settled=True) from error
        if identity is not None:
            check_identity(identity, address)
        self.settling.check(address)
        with self._lock:
            if self._closed:
                raise ReadFailed(f"transfer engine {self.address} is closed", settled=True)
            limits = self.options.limits
            window = self._windows.setdefault(address, limits.window())
            link = self._link_kind(self, address, peer, identity, window)
            self._links.add(link)  # so that ``close`` waits for it
        try:
            link.connect(given_up)
        except BaseException:
            link.close()
            raise
        with self._lock:
            if self._closed:
                raise ReadFailed(f"transfer engine {self.address} was closed while it opened {address}", settled=True)
        return link

    def forget(self, link: MooncakeLink) -> None:
        """Remove a link that has closed."""
        with self._lock:
            self._links.discard(link)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each open link uses its peer's one window, and the windows' counts are right."""
        with self._lock:
            for link in self._links:
                assert self._windows.get(link.address) is link.window, f"{link.address} has two windows"
            for window in self._windows.values():
                window.check_integrity()

    def close(self) -> None:
        """See the contract. Waits for links that are being opened, whose calls to their peers it ends."""
        with self._lock:
            self._closed = True
            links = list(self._links)
        for link in links:
            link.close()
        self.settling.stop()
        self.memory.close()
        with self._lock:
            self._release.close()  # deletes the engine
        self.settling.engine_deleted()
