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
        self._expected = expected
        self._handshakes: dict[WorkerRanks, WorkerHandshake] = {}

    @property
    def known(self) -> bool:
        """Whether every worker's handshake has arrived."""
        return len(self._handshakes) >= self._expected

    def add(self, handshakes: Mapping[WorkerRanks, WorkerHandshake]) -> tuple[WorkerHandshake, ...]:
        """Take handshakes of some or all workers.

        Returns:
            Those of all workers, stage by stage and rank by rank, if these made them complete; otherwise nothing.
        """
        together = {**self._handshakes, **handshakes}
        if together == self._handshakes:
            return ()
        self._handshakes = together
        return tuple(together[ranks] for ranks in sorted(together)) if self.known else ()
