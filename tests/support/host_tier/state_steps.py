"""States in an engine with a host tier, as vLLM's mode "align" keeps them: at borders of blocks."""

from typing import Any

from tests.support.host_tier.ranks import Contents, HostTierRank
from tests.support.host_tier.setup import Setup, Work


def end_of_step(setup: Setup, request: Any, first: int, end: int) -> int:
    """Where a step ends that begins at token ``first`` of a request and could go on to ``end``.

    vLLM keeps no state that a step has passed. While it computes a prompt, or what a preempted request has lost, steps
    end at borders of states therefore, and one that gets to none computes nothing.
    """
    size, last = setup.state_tokens, max(request.num_prompt_tokens, request.num_tokens - 1)
    if not size or first >= last:
        return end
    if end < last:
        end = end // size * size
    shared = request.shared_prefix_boundary  # where the prompt of another request has differed
    stops = [(request.num_tokens - 1) // size * size, first + (shared - first) // size * size]
    stops += [(first // size + 1) * size] if first % size else []
    return max(min((stop for stop in stops if first < stop < end), default=end), first)


def compute_state(rank: HostTierRank, work: Work, group: int, size: int, contents: Contents) -> None:
    """Go on with the state after the tokens before, from its block to that of a step's last token.

    ``contents``: what a cache group of blocks of ``size`` tokens holds after each of them.
    """
    table = work.tables[group]
    if work.first:
        source = table[(work.first - 1) // size]
        assert source, f"there is no state of cache group {group} after {work.first} tokens"
        is_right = rank.device[source][0] == contents[work.first - 1]
        assert is_right, f"a step begins with another state of cache group {group} than that after {work.first} tokens"
    rank.compute(table[(work.end - 1) // size], 0, contents[-1])
