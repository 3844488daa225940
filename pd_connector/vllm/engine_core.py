"""Access to vLLM's engine core: to wake it, to let it rest, and to learn that it was told to stop.

vLLM gives connectors no access to it: ``callers`` says how it is found.
"""

import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from pd_connector.vllm.callers import callers

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc


class EngineLoop:
    """The busy loop of this process's engine core. Does nothing before ``find``, or in the in-process ``LLM``."""

    def __init__(self) -> None:
        self._wake: Callable[[], None] | None = None
        self._core: weakref.ref[EngineCoreProc] | None = None

    def find(self) -> None:
        """Find the engine core, which must be constructing the scheduler right now."""
        from vllm.v1.engine import EngineCoreRequestType  # noqa: PLC0415  imports most of vLLM
        from vllm.v1.engine.core import EngineCoreProc  # noqa: PLC0415

        core = core_under_construction()
        if not isinstance(core, EngineCoreProc):
            self._wake = self._core = None
            return
        inputs = core.input_queue
        self._wake = lambda: inputs.put_nowait((EngineCoreRequestType.WAKEUP, None))
        self._core = weakref.ref(core)

    @property
    def can_be_woken(self) -> bool:
        """Whether ``wake`` has an effect."""
        return self._wake is not None

    def wake(self) -> None:
        """Wake the engine core from its wait for requests, so that it asks whether it must step. Thread-safe."""
        if self._wake is not None:
            self._wake()

    def rest(self, seconds: float, requests: int, answers: "Collection[Future[Any]]" = ()) -> bool:
        """Wait until something comes for the engine core, ``wake`` among it, for at most ``seconds``.

        Or until all ``answers`` are there, if any are given; return whether they are. Does not wait if the engine has
        more or fewer requests than ``requests``, counting those that end. Called on its own thread.
        """
        core = self._core() if self._core is not None else None
        if core is not None and len(core.scheduler.requests) == requests:
            inputs, news = core.input_queue.queue, core.input_queue.not_empty

            def notify(_: object) -> None:
                with news:
                    news.notify()

            for answer in answers:
                answer.add_done_callback(notify)
            with news:
                news.wait_for(lambda: inputs or (answers and _are_there(answers)), seconds)
        return _are_there(answers)

    def is_stopping(self) -> bool:
        """Return whether the engine core was told to stop (SIGTERM), so that it ends as soon as it has no work."""
        if self._core is None:
            return False
        core = self._core()
        return core is None or not core.is_running()


def _are_there(answers: "Collection[Future[Any]]") -> bool:
    return all(answer.done() for answer in answers)


def core_under_construction() -> "EngineCore | None":
    """Return the engine core that is being constructed, further up the stack; None if there is none."""
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415  imports most of vLLM

    return next((each for each in callers() if isinstance(each, EngineCore)), None)
