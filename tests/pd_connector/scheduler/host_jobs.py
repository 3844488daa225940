"""What the scheduler of a simulated engine keeps: requests, and steps that are planned."""

from dataclasses import dataclass, field
from enum import Enum

from vllm.v1.request import Request

from pd_connector.orders import Report
from tests.pd_connector.scheduler.host_ranks import Copy


class State(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    READY = "ready"  # it has its blocks, and no step has worked on it
    RUNNING = "running"
    GONE = "gone"


@dataclass(eq=False)
class Job:
    """A request as vLLM's scheduler holds it; ``tokens`` are its prompt and all that the model will ever say to it."""

    request: Request
    tokens: tuple[int, ...]
    state: State = State.WAITING
    load_failed: bool = False
    was_pulled: bool = False

    @property
    def request_id(self) -> str:
        return str(self.request.request_id)


@dataclass(frozen=True)
class Work:
    """What a step computes of one request: tokens ``first`` to ``end``."""

    job: Job
    first: int
    end: int
    tables: tuple[tuple[int, ...], ...]
    preemptions: int
    samples: bool


@dataclass(eq=False)
class Step:
    copies: list[list[Copy]]  # for each rank
    works: list[Work]
    finished: dict[str, int] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    report: Report = field(default_factory=Report)
    executed: bool = False
