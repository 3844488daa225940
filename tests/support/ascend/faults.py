"""Faults that a test switches on and off in a running server: kernels that take long, and waits that are left out.

Slow kernels are done long after they were launched, as on a device under load: who waits for them gets what is right,
and who does not reads what was there before. The server gets a file's name in its environment. What stands in
the file holds from its next engine step on. Only servers that are started with such a file have any of this.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec

VARIABLE = "ASCEND_SIM_FAULTS"

#: The wait of a store for the forward pass that writes its blocks.
STORE = "a store waits for the forward pass"
#: The wait of a request for the load of its blocks.
LOAD = "a request waits for its load"
#: The wait of a pull's thread for its own work on the device: bytes that are put into place.
SIDE_STREAM = "a pull waits for its side stream"
#: The wait of a pull for the forward pass of a request that has left, in releases where vLLM itself does not wait.
FENCE = "a pull waits for its fence"

Method = Callable[..., Any]


@dataclass(frozen=True)
class FaultSwitch:
    """The file by which a test steers one server."""

    file: Path

    @property
    def variables(self) -> tuple[tuple[str, str], ...]:
        """What the server's environment must hold."""
        return ((VARIABLE, str(self.file)),)

    @contextmanager
    def on(
        self, *without: str, model_kernel_s: float = 0.0, side_kernel_s: float = 0.0, copy_us: int = 0
    ) -> Iterator[None]:
        """Let kernels or copies take long while the block runs, and leave out waits.

        Args:
            model_kernel_s: how long each kernel of the model's thread takes at least.
            side_kernel_s: how long each kernel takes at least that a pull's thread launches on a stream of its own.
            copy_us: how long each copy on a stream takes at least.
        """
        self._write(Faults(without, model_kernel_s, side_kernel_s, copy_us))
        try:
            yield
        finally:
            self._write(Faults())

    def _write(self, faults: "Faults") -> None:
        new = self.file.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(faults))
        new.replace(self.file)


class Faults(msgspec.Struct, frozen=True):
    """What the file says."""

    without: tuple[str, ...] = ()
    model_kernel_s: float = 0.0
    side_kernel_s: float = 0.0
    copy_us: int = 0


def install_faults() -> None:
    """Put the switches into this process, if its environment names a file."""
    file = os.environ.get(VARIABLE)
    if file:
        RunningFaults(Path(file)).install()


class RunningFaults:
    """The faults of one process."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.now = Faults()

    def install(self) -> None:
        """Wrap the methods in which the connector waits."""
        from pd_connector.connector import PDConnector  # noqa: PLC0415  after vLLM's plugins have been loaded
        from pd_connector.worker.host.device_copies import HostCopies  # noqa: PLC0415
        from pd_connector.worker.pull import Pull  # noqa: PLC0415
        from transfer.copies.reshape.reshape_torch import SideStream  # noqa: PLC0415

        for owner, name, wrap in (
            (PDConnector, "bind_connector_metadata", self._at_each_step),
            (HostCopies, "_submit", self._submitting),
            (HostCopies, "take_loads", self._taking_loads),
            (SideStream, "running", self.on_side_stream),
            (Pull, "_await_device", self._awaiting_device),
        ):
            setattr(owner, name, wrap(getattr(owner, name)))

    def _at_each_step(self, bind: Method) -> Method:
        @wraps(bind)
        def bound(connector: Any, metadata: Any) -> None:
            if self._file.exists():
                self.now = msgspec.json.decode(self._file.read_bytes(), type=Faults)
                os.environ["SIMACL_COPY_US"] = str(self.now.copy_us)
            _slow_down(self.now.model_kernel_s)
            bind(connector, metadata)

        return bound

    def _submitting(self, submit: Method) -> Method:
        @wraps(submit)
        def submitted(copies: Any, describe: Any, copier: Any, order: Any) -> Any:
            from pd_connector.orders import StoreOrder  # noqa: PLC0415

            if not isinstance(order, StoreOrder) or STORE not in self.now.without:
                return submit(copies, describe, copier, order)
            own, copies._record_event = copies._record_event, lambda: None
            try:
                return submit(copies, describe, copier, order)
            finally:
                copies._record_event = own

        return submitted

    def _taking_loads(self, take: Method) -> Method:
        @wraps(take)
        def taken(copies: Any) -> Any:
            from pd_connector.worker.host.device_copies import CopyEnd  # noqa: PLC0415

            if LOAD not in self.now.without:
                return take(copies)
            loads, copies._loads = copies._loads, {}
            return {request_id: CopyEnd(copy.blocks, copy.copied_bytes, 0.0) for request_id, copy in loads.items()}

        return taken

    def _awaiting_device(self, wait: Method) -> Method:
        @wraps(wait)
        def waited(pull: Any) -> None:
            if FENCE not in self.now.without:
                wait(pull)

        return waited

    def on_side_stream(self, running: Method) -> Method:
        @wraps(running)
        @contextmanager
        def ran(stream: Any) -> Iterator[None]:
            own = stream._stream
            _slow_down(self.now.side_kernel_s)
            try:
                if own is None or SIDE_STREAM not in self.now.without:
                    with running(stream):
                        yield
                    return
                stream._module.set_device(stream._device)
                with stream._module.stream(own):
                    yield
            finally:
                _slow_down(0.0)

        return ran


def _slow_down(seconds: float) -> None:
    """Let each kernel that this thread launches from now on take at least so long."""
    from tests.support.ascend.host_kernels.dispatch import host  # noqa: PLC0415  only in processes with a device

    host.slow_down(seconds)
