"""Prefill and decode engines on one host, whose workers share device memory on fake CUDA drivers."""

from dataclasses import replace
from typing import Any

from layout.cost import CostModel
from pd_connector.params import RemotePrefill
from pd_connector.worker.pull_end import PullEnd
from pd_connector.worker.remote_reader import RemoteReader
from pd_connector.worker.same_host import TwoWayEngine
from pd_connector.worker.session import PeerSession
from tests.support.connector.engines import OURS, THEIRS, Blocks, Site, an_order
from tests.support.devices.shared_devices import SharedDevices
from tests.support.engine.ipc_engines import FakeIpcEngine
from transfer.copies.reshape.reshape_kernel import RunKernel
from transfer.engine.cuda_ipc_address import ProcessPlace


class Neighbours:
    """A prefill engine and a decode worker, and their engines for processes of the same host."""

    def __init__(
        self,
        site: Site,
        here: ProcessPlace | None = None,
        gpu: int = 1,
        kernel: RunKernel | None = None,
        **options: Any,
    ) -> None:
        """``here``: where the decode worker runs, if not on the same host. ``options``: of the prefill engine.

        ``gpu``: the decode worker's; the prefill engine has 0. ``kernel``: what copies; None: the driver.
        """
        devices = SharedDevices()
        self._site = site
        self.prefill = site.prefill(**options)
        self.worker = site.decode()[0]
        regions = self.worker.rank.geometry.regions
        self.worker.reads = RemoteReader(CostModel.of_protocol("tcp"), regions)  # compiles before there are leases
        self.theirs = site.add(FakeIpcEngine(devices))
        self.ours = site.add(FakeIpcEngine(devices, here, is_read=False, gpu=gpu, kernel=kernel))
        self.theirs.register(self.prefill.ranks[0].geometry.regions)
        self.ours.register(regions)
        self.engine = TwoWayEngine(self.worker.engine, self.ours)
        self.announce(self.theirs.address)

    def announce(self, address: str) -> None:
        """Tell decode engines this of the prefill worker's memory from now on."""
        self.announced = replace(self.prefill.ranks[0].geometry, same_host_address=address)
        self.prefill.service.set_workers((self.announced,))

    def session(self, remote: RemotePrefill, **changes: Any) -> PeerSession:
        return self._site.session(self.worker, remote, engine=self.engine, **changes)

    def pull(self, session: PeerSession | None = None, blocks: Blocks = OURS) -> tuple[PeerSession, PullEnd]:
        """How one pull ends, and the session that made it."""
        remote = self.prefill.prefill("p", THEIRS)
        session = session or self.session(remote)
        session.submit(an_order("r", remote, blocks))
        return session, self.worker.next_end()

    @property
    def mapped(self) -> int:
        """Allocations of the prefill worker that the decode worker has mapped."""
        return len(self.ours.driver.opened)
