"""What a request waits for on this rank: parts of its prompt that come from several places at once."""

from collections import Counter


class Arrivals:
    """Counts the parts of each request, and reports it when the last of them has settled. Belongs to one thread."""

    def __init__(self) -> None:
        self._expected: Counter[str] = Counter()
        self._failed: set[str] = set()
        self._finished: set[str] = set()

    def expect(self, request_id: str) -> None:
        """One more part is under way."""
        self._expected[request_id] += 1

    def settle(self, request_id: str, *, failed: bool) -> None:
        """A part has come to its end: nothing of it will be written any more."""
        self._expected[request_id] -= 1
        if failed:
            self._failed.add(request_id)
        if not self._expected[request_id]:
            del self._expected[request_id]
            self._finished.add(request_id)

    def take(self) -> tuple[set[str], set[str]]:
        """The requests whose parts have all settled since the last call, and those of them that a part failed of."""
        finished, self._finished = self._finished, set()
        failed = finished & self._failed
        self._failed -= failed
        return finished, failed

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert all(count > 0 for count in self._expected.values()), "a part has settled that was not expected"
        assert not self._finished & self._expected.keys(), "a request is reported before its last part"
        assert self._failed <= self._finished | self._expected.keys(), "a request has failed that is not known"
