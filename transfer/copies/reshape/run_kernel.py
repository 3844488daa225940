"""The kernel that copies runs of bytes on a GPU, in Triton's language. Importing this needs Triton."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["runs", "longest"])  # type: ignore[untyped-decorator]  # Triton is not followed
def copy_runs(table, runs, longest, WORD: tl.constexpr, RUNS: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Copy ``runs`` runs, of at most ``longest`` words each; a program copies ``RUNS`` side by side, then the next.

    ``table``: int64 [3, runs]: where each run goes, where it comes from (addresses), and how many words of type
    ``WORD`` it has.
    """
    for group in range(tl.program_id(0), (runs + RUNS - 1) // RUNS, tl.num_programs(0)):
        run = group * RUNS + tl.arange(0, RUNS)
        mine = run < runs
        to = tl.load(table + run, mask=mine, other=0).to(tl.pointer_type(WORD))
        origin = tl.load(table + runs + run, mask=mine, other=0).to(tl.pointer_type(WORD))
        words = tl.load(table + 2 * runs + run, mask=mine, other=0)
        for first in range(0, longest, WORDS):
            at = first + tl.arange(0, WORDS)
            inside = at[None, :] < words[:, None]
            tl.store(to[:, None] + at[None, :], tl.load(origin[:, None] + at[None, :], mask=inside), mask=inside)
