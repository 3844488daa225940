"""A control client that asks a book of checksums without a network."""

from concurrent.futures import Future
from typing import Any

from pd_connector.scheduler.prefill.checksum_table import ChecksumTable
from transfer.control.client import ControlClient
from transfer.control.messages import Checksums


class BookClient(ControlClient):
    """Asks a book without a network, and remembers what for."""

    def __init__(self, book: ChecksumTable) -> None:  # no thread
        self.book = book
        self.asked: list[Checksums] = []
        self.largest = 0

    def request(self, host: str, port: int, message: Any, timeout_s: float) -> Future[Any]:
        assert isinstance(message, Checksums)
        self.asked.append(message)
        answer: Future[Any] = Future()
        reply = self.book.answer(message)
        self.largest = max(self.largest, len(reply.sums))
        answer.set_result(reply)
        return answer
