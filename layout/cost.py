"""The cost model by which reads are planned: four numbers that say how long moving bytes takes, two of them for a link.

Holds the costs only. ``layout.staging`` decides what to do with them.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ReadCost:
    """Costs in seconds of a link that are not those of the protocol: a read takes ``alpha + beta * bytes``."""

    alpha: float  # per descriptor
    beta: float  # per byte

    @classmethod
    def of_mapped(cls, *, by_kernel: bool, is_between_devices: bool) -> "ReadCost":
        """Return what it costs to copy another process's device memory that is mapped here, by whatever copies it."""
        if by_kernel:
            return cls(_KERNEL_ALPHA, _LINK_BETA if is_between_devices else _DEVICE_BETA)
        return cls(_BATCH_ALPHA, _LINK_BETA if is_between_devices else _BATCH_BETA)


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

    def over(self, link: ReadCost | None) -> "CostModel":
        """Return the costs with the reads of a link; None: of one that has no costs of its own."""
        return self if link is None else replace(self, alpha=link.alpha, beta=link.beta)

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

# Mapped memory. A kernel's descriptor costs the host no more than its copy out of the staging buffer, measured on
# one core. A batch of the driver's blocked for 3.6 us a run of 16 KiB, between an H200 and its host.
_KERNEL_ALPHA, _BATCH_ALPHA = 6e-9, 3.6e-6
# Bytes: not measured. Within a GPU, a kernel is said to move 1,627 GB/s and a batch 87. Between GPUs, PCIe's 40 GB/s:
# over NVLink, reads take less than is planned.
_DEVICE_BETA, _BATCH_BETA, _LINK_BETA = 0.001e-9, 0.0115e-9, 0.025e-9
