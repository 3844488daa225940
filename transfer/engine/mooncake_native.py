"""The Mooncake library as this project uses it: loaded with the right environment, deleted without stalling Python.

All calls into Mooncake are in this module, along with the library's behaviour that callers must know. ``mooncake``
decides what a read is and when its memory may be used again.

Two problems of Mooncake are worked around through its sockets, which are file descriptors of this process:

- Its destructor holds the GIL while it waits up to a second for a thread in ``accept``. A model process must not stop
  for that long, so the wait is shortened before the destructor runs (measured: from 1,005 ms to about 3).
- The first call to a peer that accepts but never answers blocks for 60 s. Shutting down that connection ends the call.
"""

import ctypes
import importlib
import math
import os
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from layout.geometry import Region
from layout.regions import describe_region
from transfer.engine.ascend_environment import ascend_settings, link_s, set_qos
from transfer.engine.connecting import MAPPED, connections_to, listeners, probe_peers
from transfer.engine.interface import EngineStartError
from transfer.peers import Address, parse_address, parse_ip, resolve
from transfer.threads import check_threads, no_threads

_CODES = {
    -1: "invalid argument",
    -6: "no such device",
    -7: "it overlaps memory that is registered already",
    -202: "the driver refused it. A GPU's memory needs the kernel module nvidia-peermem, or WITH_NVIDIA_PEERMEM=0 in "
    "the environment (DMA-BUF); a host's needs `ulimit -l unlimited`",
}
#: Mooncake's transport for Ascend returns -1 for whatever it is refused.
_ASCEND_REFUSED = (
    "CANN's answer is in Mooncake's line 'Register mem ret' above. CANN's documentation allows 50 GB of device memory "
    "on A2 and A3: if these are exceeded, lower gpu_memory_utilization"
)
_OPEN_SEGMENT = "_ZN8mooncake14TransferEngine11openSegmentERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_NO_SEGMENT = 2**64 - 1
_STILL_IN_FLIGHT = -2  # for longer than MC_SLICE_TIMEOUT, which cancels nothing
_ACCEPT_TIMEOUT_S = 0.001

#: Files that an engine keeps open on TCP when it has read from one peer: two ports and what watches them, four
#: connections, and what ``NativeEngine`` opens. Measured.
ENGINE_FILES = 10

#: Files that are left to the rest of the process. Without any, Mooncake's threads spin, and so may others'.
_SPARE_FILES = 128

#: Threads of an engine that reads from one peer, and the one that waits for the peer's first answer. Measured.
_ENGINE_THREADS = 3 + 1
_A_LINK = "a link"

#: The numbers of this process's files.
_FILES = "/proc/self/fd"

_IPV6 = "MC_USE_IPV6"
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_GLOBAL_SCOPE = "00"  # its fourth column; loopback and addresses of a link have others


@dataclass(frozen=True, slots=True)
class NativeOptions:
    """The options that start a Mooncake engine."""

    host: str  # this machine's address as peers reach it, without port or brackets
    protocol: str = "tcp"
    devices: str = ""  # comma-separated network devices, "" for all
    progress_timeout_s: float = 10.0  # over TCP, Mooncake gives up a transfer that moves no byte for this long
    connect_timeout_s: float = 5.0  # for a peer's first answer; on Ascend, the link's own time comes after it
    qos: int | None = None  # class of traffic on Ascend; None: CANN's


def set_environment(options: NativeOptions, environment: MutableMapping[str, str]) -> None:
    """Set the variables that Mooncake reads to what this project needs, unless the user has set them.

    Mooncake reads them on import and when its first engine starts, so the first engine of a process decides.

    Raises:
        EngineStartError: a variable of the user's that others are derived from, or merged with, is wrong.
    """
    progress_s = str(max(1, math.ceil(options.progress_timeout_s)))
    settings = {
        # With the default of 1,024 queued and 1,024 pending transfers per peer, a larger batch can break the connection
        # for good. The window of a peer is the limit instead.
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": progress_s,
        "MC_TCP_STATUS_TIMEOUT_SEC": progress_s,
        "MC_HANDSHAKE_CONNECT_TIMEOUT": str(max(1, math.ceil(options.connect_timeout_s))),
        "MC_LOG_LEVEL": "ERROR",
    }
    if options.protocol == "rdma":
        settings["MC_FORCE_HCA"] = "1"  # otherwise Mooncake takes TCP where none of the devices can be used
        # Two of the threads that serve a NIC, its default, are enough to move bytes, but each makes blocking calls to
        # peers that fail, while all others wait. They use a core each as long as anything is in flight.
        settings["MC_WORKERS_PER_CTX"] = "4"
        settings["MC_CONN_PAUSE_TTL_MS"] = "2000"  # after a connection failed, fail at once instead of trying again
        settings["MC_HANDSHAKE_CONNECT_TIMEOUT"] = str(min(2, max(1, math.ceil(options.connect_timeout_s))))
    if options.protocol == "ascend":
        settings |= ascend_settings(environment, options.connect_timeout_s)
        if options.qos is not None:
            set_qos(environment, options.qos)
    if options.protocol == "tcp":
        settings["MC_FORCE_TCP"] = "1"  # otherwise Mooncake uses any RDMA device that it finds
    if environment.get(_IPV6) in ("", "0"):
        del environment[_IPV6]  # Mooncake takes any value for yes
    elif ":" in options.host or (options.protocol == "tcp" and has_ipv6_address()):
        settings[_IPV6] = "1"  # it then listens for both families, and reaches IPv4 by mapped addresses
    for name, value in settings.items():
        environment.setdefault(name, value)


def has_ipv6_address() -> bool:
    """Return whether this machine has an IPv6 address by which it can reach others, and sockets that take IPv4 too."""
    lines = _IPV6_ADDRESSES.read_text().splitlines() if _IPV6_ADDRESSES.exists() else []
    return any(line.split()[3] == _GLOBAL_SCOPE for line in lines) and socket.has_dualstack_ipv6()


def load(options: NativeOptions) -> Any:
    """Set the environment, import Mooncake and return its TransferEngine class.

    Raises:
        EngineStartError: Mooncake or a library that it needs is not installed, or the environment is wrong.
    """
    set_environment(options, os.environ)
    try:
        return importlib.import_module("mooncake.engine").TransferEngine
    except ImportError as error:
        raise EngineStartError(_explain_import_error(error)) from error


#: Libraries of the system that wheels are linked to, and Debian's packages of them. libmlx5 is CUDA 13's alone.
_OF_THE_SYSTEM = ("libibverbs", "libmlx5", "libnuma", "libcurl.")
_PACKAGES = ("libibverbs1", "ibverbs-providers", "libnuma1", "libcurl4")
#: Libraries of CANN that the wheel for NPUs is linked to.
_OF_CANN = ("libascendcl", "libllm_datadist", "libmetadef")


def _explain_import_error(error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError):
        hint = "install it with the extra for your platform: pip install 'pd-connector[cpu]', [cuda], [cuda12] or [npu]"
    elif any(library in str(error) for library in _OF_THE_SYSTEM):
        hint = "that is a library of the system, needed also for TCP: apt-get install " + " ".join(_PACKAGES)
    elif "libcudart.so.12" in str(error):
        hint = "this wheel is for CUDA 12; install mooncake-transfer-engine-cuda13 in its place (the extra [cuda])"
    elif "libcudart.so.13" in str(error):
        hint = "this wheel is for CUDA 13; install mooncake-transfer-engine in its place (the extra [cuda12])"
    elif "undefined symbol" in str(error):
        hint = "a library that it is linked to is too old for it; on an NPU that is CANN, see docs/npu.md for versions"
    elif any(library in str(error) for library in _OF_CANN):
        hint = "that library is part of CANN: source CANN's set_env.sh, which adds it to LD_LIBRARY_PATH"
    else:
        hint = "a library that it is linked to is missing; check that the wheel fits the platform (cpu, cuda, npu)"
    return f"cannot import the Mooncake transfer engine ({error}): {hint}"


class _CppString(ctypes.Structure):
    """A ``std::string`` as libstdc++ lays it out, to be passed by reference and not changed."""

    _fields_ = (("text", ctypes.c_char_p), ("size", ctypes.c_size_t), ("room", ctypes.c_char * 16))


def find_open_segment() -> Callable[..., int] | None:
    """Return ``TransferEngine::openSegment`` of the library that is loaded, None if it is not exported."""
    library = importlib.import_module("mooncake.engine")
    if not hasattr(library.TransferEngine, "get_engine_ptr"):
        return None
    try:
        method = ctypes.CDLL(library.__file__)[_OPEN_SEGMENT]
    except (AttributeError, OSError):
        return None
    method.argtypes, method.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_uint64
    found: Callable[..., int] = method
    return found


def check_open_files() -> None:
    """Raise unless one engine more leaves enough of the files that this process may have open.

    The soft limit need not be raised: Mooncake sets it to the hard limit when the first engine starts.

    Raises:
        EngineStartError: there are not enough; the message names the numbers and the ways out.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    in_use = len(os.listdir(_FILES))
    if in_use + ENGINE_FILES + _SPARE_FILES > limit:
        raise EngineStartError(
            f"this process has {in_use} files open and may have {limit}, of which {_SPARE_FILES} are kept for other "
            f"uses; a link needs {ENGINE_FILES}. Raise the hard limit of open files (ulimit -n; docker run --ulimit "
            "nofile=65536; LimitNOFILE= for systemd)"
        )


def check_link_threads() -> None:
    """Raise unless the system has the threads that one engine more needs.

    Raises:
        EngineStartError: it has not; the message names the limits that there may be.
    """
    try:
        check_threads(_A_LINK, _ENGINE_THREADS)
    except RuntimeError as error:
        raise EngineStartError(str(error)) from error


class NativeEngine:
    """Owns the only reference to a Mooncake engine: after ``delete`` it is gone, with its threads and sockets.

    Unless it is lent: then it lives as long as its lender, and so does what is registered.

    Raises:
        EngineStartError: Mooncake is not installed or does not start.
    """

    def __init__(self, options: NativeOptions, lend: Callable[[str], Any] | None = None) -> None:
        """Start an engine. ``lend`` returns one that is known by this host, and that others use too."""
        self._options = options
        self._is_lent = lend is not None
        new = load(options)  # also sets the environment
        #: For how long the first read of a peer may make the link. 0 where ``exchange_metadata`` does, or nothing.
        self.link_s = link_s(os.environ, options.connect_timeout_s) if options.protocol == "ascend" else 0.0
        try:
            self._engine: Any = new() if lend is None else lend(options.host)
        except RuntimeError as error:
            raise EngineStartError(f"the transfer engine that is to be shared does not start: {error}") from error
        before = set(os.listdir(_FILES))  # with the number of that look itself, which the next file gets
        try:
            # Kept open: where batches are looked at, a lack of file descriptors must not make one unreadable.
            self._memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise EngineStartError(f"cannot read this process's memory, by which reads are watched: {error}") from error
        known = (options.host, "P2PHANDSHAKE", options.protocol, options.devices)
        try:
            code = 0 if self._is_lent else self._engine.initialize(*known)
        except RuntimeError as error:  # C++'s system_error: a thread was refused
            # Never destroyed, not even at exit: its destructor would join threads that never started, which aborts.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._engine))
            os.close(self._memory)
            raise EngineStartError(no_threads(error, _A_LINK, _ENGINE_THREADS)) from error
        if code != 0:
            self._engine = None
            os.close(self._memory)
            raise EngineStartError(
                f"Mooncake did not start (code {code}) with host {options.host!r}, protocol {options.protocol!r}, "
                f"devices {options.devices!r}: the host must be an address of this machine, the devices must exist, "
                "and there must be free ports from 15000 to 17000, or as MC_MIN_RPC_PORT and MC_MAX_RPC_PORT say: over "
                "TCP, each link takes two of its host. MC_LOG_LEVEL=INFO tells more"
            )
        self._port = int(self._engine.get_rpc_port())
        self._files = set(os.listdir(_FILES)) - before  # new ones: a look at each of thousands takes long
        probe_peers(self._files)
        #: Whether it can reach IPv6 addresses. The first engine of a process decides for all.
        self.speaks_ipv6 = self._listens_for_ipv6()
        self._names: dict[str, str] = {}  # of peers since the last probe, as this engine can resolve them, by address
        self._open_segment = find_open_segment()
        #: Whether the counters of batches can be read, see ``mooncake_batches``; None until the first batch.
        self.counts: bool | None = None

    @property
    def address(self) -> str:
        """Where peers reach this engine: ``host:port``, the host in brackets if it is an IPv6 address."""
        return str(Address(self._options.host, self._port))

    def refusal(self, address: str) -> str:
        """Return why this engine can never reach a peer at ``address``, empty if it may."""
        if self.speaks_ipv6 or not address.startswith("["):
            return ""
        return (
            "that is an IPv6 address, and the transfer engine here speaks IPv4 only"
            f"{self.other_family(address)}. Or give this machine an IPv6 address and unset {_IPV6}"
        )

    def other_family(self, address: str) -> str:
        """Return a sentence about the address families of a peer and of this engine, empty if they do not differ.

        Host names have no family.
        """
        theirs, ours = parse_ip(parse_address(address).host), parse_ip(self._options.host)
        if theirs is None or ours is None or theirs.version == ours.version:
            return ""
        return (
            f". It announces an address of IPv{theirs.version}, and the host here is {ours} (IPv{ours.version}): "
            "let the setting host name addresses of one family on both sides"
        )

    def register(self, regions: Sequence[Region]) -> None:
        """Let peers read ``regions``, all or none. Holds the GIL, so use it at start-up only.

        Raises:
            EngineStartError: Mooncake refused a region.
        """
        for number, region in enumerate(regions):
            code = self._engine.register_memory(region.address, region.size)
            if code != 0:
                for done in regions[:number]:
                    self._engine.unregister_memory(done.address)
                of_cann = self._options.protocol == "ascend" and code == -1
                why = _ASCEND_REFUSED if of_cann else _CODES.get(code, "no reason given")
                raise EngineStartError(
                    f"Mooncake refused to register the {describe_region(region)} (code {code}): {why}"
                )

    def probe(self, address: str) -> bool:
        """Return whether the peer answers. Blocks up to 60 s; ``interrupt`` ends it. Releases the GIL.

        The peer's host name is looked up anew: it may have come back at another address.
        """
        self._names.pop(address, None)
        return bool(self._engine.send_probe(self._name(address)) == 0)

    def exchange_metadata(self, address: str) -> bool:
        """Get from the peer what reads from it need, and return whether it answered. Blocks like ``probe``.

        The first read would do the same, but under the one lock of the Python wrapper, which every transfer takes: a
        peer that does not answer would stop the reads from all others. So this calls the C++ method behind it, which
        takes no lock. Returns True, without having done it, where the build does not export that method.
        """
        if self._open_segment is None:
            return True
        text = self._name(address).encode()
        name = _CppString(text, len(text))
        return bool(self._open_segment(self._engine.get_engine_ptr(), ctypes.byref(name)) != _NO_SEGMENT)

    def submit(self, address: str, destinations: list[int], sources: list[int], sizes: list[int]) -> int:
        """Queue a batch of reads and return its id, or 0 if it was not queued.

        The first call to a peer connects, which blocks up to 60 s (``interrupt`` ends it). Releases the GIL.
        """
        batch = int(self._engine.batch_transfer_async_read(self._name(address), destinations, sources, sizes))
        return 0 if batch in (-1, 2**64 - 1) else batch

    def poll(self, batch: int) -> int:
        """Return the state of a batch of ONE descriptor: 0 in progress, 1 done, negative failed and final.

        Unless it is 0, the id is no longer valid. Never call this for a longer batch: it looks only at the first
        descriptor and may then free the whole batch.
        """
        state = int(self._engine.transfer_check_status(batch))
        return 0 if state == _STILL_IN_FLIGHT else state

    def wait(self, batch: int) -> int:
        """Free a batch of any length that is done, and return 0. Would spin on a core until it is."""
        return int(self._engine.get_batch_transfer_status([batch]))

    def memory_at(self, address: int, size: int) -> bytes:
        """Return bytes of this process's memory.

        Raises:
            OSError, OverflowError: there is no such memory.
        """
        return os.pread(self._memory, size, address)

    def interrupt(self, address: str) -> None:
        """Make calls fail that wait for the peer's first answer, or for its system's."""
        peer = parse_address(address)
        try:
            peers = {entry[4][0] for entry in socket.getaddrinfo(peer.host, peer.port, type=socket.SOCK_STREAM)}
        except (OSError, UnicodeError):
            return  # without an address there is no connection
        for connection, ip in connections_to(peer.port):
            with suppress(OSError):  # the connection has ended
                if ip in peers:
                    connection.shutdown(socket.SHUT_RDWR)

    def delete(self) -> None:
        """Delete the engine, which writes nothing after that. No other call may be running. Idempotent.

        One that is lent is only let go of.
        """
        if self._engine is not None:
            # This only saves time, and it fails without a free file descriptor: delete the engine in any case.
            with suppress(OSError):
                if not self._is_lent:
                    self._shorten_accept()
            self._engine = None
            os.close(self._memory)

    def _listens_for_ipv6(self) -> bool:
        return any(listener.family == socket.AF_INET6 for listener in self._listeners())

    def _listeners(self) -> Iterator[socket.socket]:
        """Yield duplicates of what listens on the engine's port, as ``own_sockets`` does."""
        is_new = False
        for listener in listeners(self._files):
            if listener.getsockname()[1] == self._port:
                is_new = True
                yield listener
        if not is_new:  # the engine is lent, or its listener has the number of a file that was closed meanwhile
            yield from (each for each in listeners() if each.getsockname()[1] == self._port)

    def _name(self, address: str) -> str:
        """Return a peer's address as this engine can resolve it: with IPv6, it looks for IPv6 addresses only."""
        if not self.speaks_ipv6:
            return address
        name = self._names.get(address)
        if name is None:
            peer = parse_address(address)
            host = peer.host
            with suppress(OSError):  # a name without an address is Mooncake's to refuse
                host = resolve(host)
            is_ipv4 = isinstance(parse_ip(host), IPv4Address)
            name = self._names[address] = str(Address(MAPPED + host if is_ipv4 else host, peer.port))
        return name

    def _shorten_accept(self) -> None:
        for listener in self._listeners():
            timeout = struct.pack("ll", 0, int(_ACCEPT_TIMEOUT_S * 1e6))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            # An accept in progress keeps its old timeout; a connection ends it.
            loopback = "::1" if listener.family == socket.AF_INET6 else "127.0.0.1"
            try:
                socket.create_connection((loopback, self._port), timeout=1.0).close()
            except OSError:
                return  # bound to another interface: the destructor takes up to a second
            time.sleep(5 * _ACCEPT_TIMEOUT_S)
