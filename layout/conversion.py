"""A one-line summary of how the remote engine's KV blocks are converted, for logs.

Only describes: ``layout.plan`` decides what is done.
"""

from collections.abc import Mapping, Sequence

from layout.geometry import Plane, WorkerGeometry
from layout.plan import Plan


def describe_conversion(local: WorkerGeometry, remotes: Sequence[WorkerGeometry], plans: Mapping[int, Plan]) -> str:
    """Describe what is converted, from the remote value to the local one, and how many runs a block is cut into.

    Also names optional layers that the remote engine is without.

    ``plans`` are those of ``local``, keyed by index into ``remotes``. Physical orders are written as in
    ``physical_order``; K and V are listed separately where theirs differ.
    """
    there, here = [remotes[index] for index in plans], [local]
    if not there:
        return "nothing to read"
    compared = [
        ("TP", there[0].tp_size, local.tp_size),
        ("PP", there[0].pp_size, local.pp_size),
        ("ranks that share tokens", _sharing_ranks(there), _sharing_ranks(here)),
        ("block size", _block_sizes(there), _block_sizes(here)),
        ("order", *_orders(there, here)),
    ]
    changes = [f"{name} {remote} to {ours}" for name, remote, ours in compared if remote != ours]
    runs = sum(plan.runs for plan in plans.values())
    size = sum(plan.run_bytes for plan in plans.values())
    cut = f"{size} bytes in {runs} runs for each {_units(plans)} tokens" if runs else "no tokens"
    if states := sum(plan.state_runs for plan in plans.values()):
        cut += f", {sum(plan.state_bytes for plan in plans.values())} bytes in {states} runs for each state"
    return f"{', '.join(changes) or 'the same geometry'}; {cut}, before neighbours are joined{_lacking(local, remotes)}"


def _lacking(local: WorkerGeometry, remotes: Sequence[WorkerGeometry]) -> str:
    """Name the optional layers that the remote engine is without."""
    there = {name for worker in remotes for group in worker.groups for name in group.layers}
    planes = [plane for group in local.groups for plane in group.planes if plane.optional]
    lacking = sorted({name for plane in planes for name in plane.layers} - there)
    return f"; layers {', '.join(lacking)} draft tokens and are not there: fewer drafts are accepted" if lacking else ""


def _block_sizes(workers: Sequence[WorkerGeometry]) -> str:
    sizes = {group.block_tokens for worker in workers for group in worker.groups if group.planes}
    return "/".join(map(str, sorted(sizes)))


def _sharing_ranks(workers: Sequence[WorkerGeometry]) -> int:
    return max(plane.tokens.ranks for worker in workers for group in worker.groups for plane in group.planes)


def _orders(*sides: Sequence[WorkerGeometry]) -> tuple[str, ...]:
    """Return the physical orders of each side, without the layer axis if some plane has a single layer."""
    planes = [[plane for worker in side for group in worker.groups for plane in group.planes] for side in sides]
    alone = any(len(plane.layers) == 1 for side in planes for plane in side)
    orders = [[physical_order(plane) for plane in side] for side in planes]
    return tuple("/".join(dict.fromkeys(o.replace("L", "") if alone else o for o in side)) for side in orders)


def physical_order(plane: Plane) -> str:
    """Return the axes of ``plane`` with more than one index, outermost first, e.g. "BHLNC" if each axis has several.

    L is layer, B block, H head, N token and C content.
    """
    sizes = (len(plane.layers), plane.blocks, plane.heads, plane.block_tokens, plane.content)
    strides = (plane.layer_stride, plane.block_stride, plane.head_stride, plane.token_stride, plane.content_stride)
    axes = [(stride, axis) for stride, axis, size in zip(strides, "LBHNC", sizes, strict=True) if size > 1]
    return "".join(axis for _, axis in sorted(axes, key=lambda entry: -entry[0]))


def _units(plans: Mapping[int, Plan]) -> str:
    return "/".join(dict.fromkeys(str(unit) for plan in plans.values() for unit in plan.period_tokens))
