"""What moving bytes costs, as four numbers: the measure by which reads are planned.

Only prices are kept here. What is bought with them is decided in ``layout.staging``.
"""

from dataclasses import dataclass, fields
from math import isfinite


@dataclass(frozen=True, slots=True)
class CostModel:
    """Prices in seconds: a read costs ``alpha + beta * bytes``, a local copy ``copy_alpha + copy_beta * bytes``.

    Raises:
        ValueError: a price is negative or not a finite number.
    """

    alpha: float  # of a descriptor
    beta: float  # of a byte read
    copy_alpha: float  # of a run copied locally
    copy_beta: float  # of a byte copied locally

    def __post_init__(self) -> None:
        for field in fields(self):
            price = getattr(self, field.name)
            if not (isfinite(price) and price >= 0):
                raise ValueError(
                    f"cost model: {field.name} is {price!r}; it must be a finite number of seconds, zero or more"
                )

    @classmethod
    def of_protocol(cls, protocol: str) -> "CostModel":
        """The default prices of a transfer protocol: measured for "tcp", estimated for "rdma" and "ascend".

        Raises:
            ValueError: no defaults are known for ``protocol``.
        """
        if protocol not in _DEFAULTS:
            raise ValueError(
                f"no default costs are known for protocol {protocol!r}, only for {', '.join(sorted(_DEFAULTS))}; "
                "measure them and pass a CostModel"
            )
        return _DEFAULTS[protocol]

    def read_s(self, descriptors: int, size: int) -> float:
        """Seconds for ``descriptors`` reads of ``size`` bytes together."""
        return self.alpha * descriptors + self.beta * size

    def copy_s(self, runs: int, size: int) -> float:
        """Seconds for ``runs`` local copies of ``size`` bytes together."""
        return self.copy_alpha * runs + self.copy_beta * size


# Local copies: transfer.local_copy.reshape on one core of a server CPU, memory to memory, 64-byte lines.
_COPY_ALPHA, _COPY_BETA = 30e-9, 0.15e-9

_DEFAULTS = {
    # Measured with benchmarks.unequal: Mooncake over TCP on loopback and two cores, whole pulls in pieces of 16 KB
    # (alpha) and in windows of 8 MB (beta, with what a window costs beside its bytes).
    "tcp": CostModel(12e-6, 0.75e-9, _COPY_ALPHA, _COPY_BETA),
    # Estimates, not measured: about 2 us for a work request and its completion, one 200 Gbit/s port.
    "rdma": CostModel(2e-6, 0.04e-9, _COPY_ALPHA, _COPY_BETA),
    # Estimates, not measured: a heavier submission than RDMA's, the same port.
    "ascend": CostModel(5e-6, 0.04e-9, _COPY_ALPHA, _COPY_BETA),
}
