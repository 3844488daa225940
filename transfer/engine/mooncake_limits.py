"""How much is in flight at once, and how often it is looked at, on each of Mooncake's transports.

Measured on TCP. On RDMA and Ascend they are argued from Mooncake's source, and not measured. What is in flight
to a peer, descriptors a call and the longest pause can be set instead.
"""

from dataclasses import dataclass

from transfer.engine.window import Window


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one transport."""

    per_call: int  # descriptors that are submitted together
    in_flight: int  # descriptors to one peer
    in_flight_s: float  # predicted time of what is in flight to one peer, beside what the reader's lateness adds
    most_in_flight: int  # what ``in_flight`` can be set to
    # Between two looks a read sleeps for an eighth of the time it has taken so far, within these limits.
    shortest_pause_s: float
    longest_pause_s: float
    piece_bytes: int  # larger descriptors are split
    alignment: int = 1  # of the address of memory that is registered, in bytes
    most_regions: int | None = None  # that can be registered; None: no limit is known
    most_calls: int | None = None  # to one peer, over all reads; None: as descriptors and time allow

    def window(self) -> Window:
        """Return what counts what is in flight to one peer."""
        return Window(self.in_flight, self.in_flight_s, self.most_calls)

    def pause_s(self, elapsed_s: float) -> float:
        """Return how long to sleep between two looks at a read that has taken ``elapsed_s`` so far."""
        return min(max(elapsed_s / 8, self.shortest_pause_s), self.longest_pause_s)


LIMITS = {
    # Four connections to a peer take one descriptor each at a time, so depth wins nothing; above 1,024 the connection
    # can break for good. Longer sleeps leave the cores to the threads that move the bytes (500 us: 5-10% faster than
    # 100 us above 1 ms); shorter ones do not pay off (20 us: 10-15% slower).
    # 10 ms are 13 MB, and each call half of that. A link has connections of its own, which share the wire with those of
    # another link whatever is in flight, so less would not let a short read through sooner (100 tokens beside 100,000:
    # 1.9 times their time alone with 10 ms, 2.2 times with 6).
    # Pieces are small against a call, so that all connections have some of it to the end. They also bound what may
    # still be in progress when the last descriptor of a call is done, and so how far a read can overrun its timeout.
    # Reads of 47 x 737 KB, lower quartiles against no bound and whole descriptors: in pieces of 256 KiB with 3 ms in
    # flight 10% slower, with 5 ms 7%, with 8 ms 5%, with 10 ms alike; in pieces of 512 KiB with 6 ms 15% slower.
    "tcp": Limits(256, 1024, 10e-3, 1024, 50e-6, 500e-6, 256 << 10),
    # What is in flight must last for a sleep at the rate of the wire, or the wire waits: 2,048 descriptors of 4 KiB and
    # 200 us are 42 GB/s, more than a NIC of 200 Gbit/s carries and than one thread submits. The queue pairs hold 512
    # work requests; what is beyond waits in a queue without a limit. Calls of 256 descriptors keep several in flight.
    # All links to a peer share its queues, so a read that begins waits for what is in flight: 2 ms, ten sleeps, 50 MB.
    # Descriptors become slices of 64 KiB, of which the first 512 of a larger one are posted before the rest is looked
    # at. If Mooncake then refuses the call, they are in flight unnoticed: so none is as large as that.
    "rdma": Limits(256, 2048, 2e-3, 65536, 50e-6, 200e-6, 16 << 20),
    # A call is one job of a pool of 16 threads (ASCEND_THREAD_POOL_SIZE), issued in batches, and only one job
    # runs for a peer at a time: long calls, and two of them, so that the next is ready. More would only hold threads
    # that other peers need: a job to a peer that has died lasts for two ASCEND_TRANSFER_TIMEOUTs, and nothing ends it.
    # Each call lasts for two sleeps: 4 ms in flight. A piece is shorter than a call, so that two fit.
    # CANN (HIXL) says that over HCCS, connections may fail unless memory is aligned to pages of 2 MiB. vllm-ascend's
    # own connectors register no more than 256 regions.
    "ascend": Limits(
        1024, 2048, 4e-3, 65536, 200e-6, 1e-3, 16 << 20, alignment=2 << 20, most_regions=256, most_calls=2
    ),
}
