"""Which workers the scheduler side knows: their handshakes, however they arrive.

vLLM passes handshakes on when the engine starts, unless the connector is a child of MultiConnector, which passes on
those of its first child only. The workers then send theirs with the reports of the first step.
"""

from collections.abc import Mapping

from pd_connector.orders import WorkerHandshake, WorkerRanks


class Workers:
    """The handshakes of an engine's workers. Belongs to the scheduler's thread."""

    def __init__(self, expected: int) -> None:
        """``expected``: number of workers of the engine."""
        self.expected = expected
        self._arrived: dict[WorkerRanks, WorkerHandshake] = {}
        self._current: tuple[WorkerHandshake, ...] = ()
        #: Whether every worker's handshake has arrived, all of one generation.
        self.known = False

    def add(self, handshakes: Mapping[WorkerRanks, WorkerHandshake]) -> tuple[WorkerHandshake, ...]:
        """Take handshakes of some or all workers.

        Returns:
            Those of all workers, stage by stage and rank by rank, if they have just become known and are news;
            otherwise nothing.
        """
        if not handshakes:
            return ()
        self._arrived.update(handshakes)
        generations = {handshake.generation for handshake in self._arrived.values()}
        self.known = len(self._arrived) >= self.expected and len(generations) == 1
        if not self.known:
            return ()
        in_order = tuple(self._arrived[ranks] for ranks in sorted(self._arrived))
        if in_order == self._current:
            return ()
        self._current = in_order
        return in_order

    def expect_again(self) -> None:
        """Wait until every worker has sent its handshake again, the same as before or a new one."""
        self._arrived.clear()
        self.known = False
