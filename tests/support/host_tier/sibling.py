"""A sibling in MultiConnector of an engine with a host tier: it loads prompts while a step computes, or fails to.

For engines of one cache group, as vLLM wants of connectors that report failed loads by blocks.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.support.host_tier.setup import Job, Step, Work

if TYPE_CHECKING:
    from tests.support.host_tier.engine import HostTierEngine


def load_from_sibling(
    engine: "HostTierEngine", job: Job, hit: Any, local: int, budget: int, *, fails: bool
) -> Work | None:
    """The sibling holds all whole blocks of a request beyond the ``local`` tokens that the device holds."""
    request, (size,) = job.request, engine.setup.sizes
    end = max((request.num_tokens - 1) // size * size, local)
    new = min(budget, request.num_tokens - end)
    given = engine.manager.allocate_slots(
        request,
        new,
        num_new_computed_tokens=local,
        new_computed_blocks=hit,
        num_external_computed_tokens=end - local,
    )
    if given is None:
        return None
    blocks = engine.manager.get_blocks(job.request_id)
    engine.external.allocated(request, blocks, 0)
    assert engine.tier.allocated(request, blocks, 0) == 0
    request.num_computed_tokens = end
    return replace(engine.run(job, new), sibling=range(local, end), fails=fails and end > local)


def take_back(engine: "HostTierEngine", step: Step) -> list[Job]:
    """What vLLM does with the requests that a failed load has reached; return them."""
    size = engine.setup.sizes[0]
    invalid: set[int] = set()
    for work in step.works:
        if work.fails:
            invalid.update(work.tables[0][work.sibling.start // size : work.sibling.stop // size])
    invalid.discard(0)
    marked: set[int] = set()
    reached: list[Job] = []
    scheduled = {id(work.job): work.end - work.first for work in step.works}
    for job in list(engine.running) if invalid else ():
        request = job.request
        (table,) = engine.manager.get_block_ids(job.request_id)
        before = request.num_computed_tokens - scheduled.get(id(job), 0)
        wrong = [number for number in range(-(-before // size)) if table[number] in invalid]
        if not wrong:
            continue
        reached.append(job)
        new = [number for number in wrong if table[number] not in marked]
        request.num_computed_tokens = new[0] * size if new else before
        marked.update(table[number] for number in wrong)
        if new and not engine.setup.recomputes:
            engine.manager.evict_blocks({block for block in table[new[0] :] if block})
    for job in reached if not engine.setup.recomputes else ():
        engine.finish(job, frees=True)
    return reached
