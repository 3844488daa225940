"""The cost model by which reads are planned: four numbers that say how long moving bytes takes.

Holds the costs only. ``layout.staging`` decides what to do with them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs in seconds: a read takes ``alpha + beta * bytes``, a local copy ``copy_alpha + copy_beta * bytes``."""

    alpha: float  # per descriptor
    beta: float  # per byte read
    copy_alpha: float  # per run copied locally
    copy_beta: float  # per byte copied locally

    @classmethod
    def of_protocol(cls, protocol: str) -> "CostModel":
        """Return the default costs of a transfer protocol: measured for "tcp", estimated for "rdma" and "ascend"."""
        return _DEFAULTS[protocol]

    def read_s(self, descriptors: int, size: int) -> float:
        """Return the seconds that ``descriptors`` reads of ``size`` bytes in total take."""
        return self.alpha * descriptors + self.beta * size

    def copy_s(self, runs: int, size: int) -> float:
        """Return the seconds that ``runs`` local copies of ``size`` bytes in total take."""
        return self.copy_alpha * runs + self.copy_beta * size


# Local copies: transfer.copies.reshape.reshape on one core of a server CPU, memory to memory, 64-byte lines.
_COPY_ALPHA, _COPY_BETA = 30e-9, 0.15e-9

_DEFAULTS = {
    # Measured with benchmarks.unequal: whole pulls over Mooncake TCP on loopback with two cores, in pieces of 16 KB
    # (alpha) and in windows of 8 MB (beta, including the fixed cost of a window).
    "tcp": CostModel(12e-6, 0.75e-9, _COPY_ALPHA, _COPY_BETA),
    # Estimated, not measured: about 2 us for a work request and its completion, one 200 Gbit/s port.
    "rdma": CostModel(2e-6, 0.04e-9, _COPY_ALPHA, _COPY_BETA),
    # Estimated, not measured: submission costs more than on RDMA, the port is the same.
    "ascend": CostModel(5e-6, 0.04e-9, _COPY_ALPHA, _COPY_BETA),
}
