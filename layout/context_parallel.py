"""Context parallelism: on which rank a request's tokens lie where ranks share them, and at which place there.

    token              0 1 2 3 4 5  6 7 8 9 10 11      interleave 2, 3 ranks
    rank               0 0 1 1 2 2  0 0 1 1  2  2
    place on its rank  0 1 0 1 0 1  2 3 2 3  2  3

A rank's block holds ``places``: as many neighbouring ones as it has rows. A block of the block table stands for these
of all ranks, so for ``ranks`` times as many tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from layout.copies import Int64Array


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """Which tokens of a request a rank holds: ``interleave`` in a row, of which the ``ranks`` take turns."""

    interleave: int = 1
    ranks: int = 1
    rank: int = 0

    @property
    def period(self) -> int:
        """Number of tokens after which it is the same rank's turn again."""
        return self.interleave * self.ranks if self.ranks > 1 else 1

    def holds(self, tokens: Int64Array) -> npt.NDArray[np.bool_]:
        """Return which of ``tokens`` this rank holds."""
        return np.asarray(tokens // self.interleave % self.ranks == self.rank, np.bool_)

    def before(self, tokens: Int64Array) -> Int64Array:
        """Return how many tokens of this rank come before each of ``tokens``: the places of those that it holds."""
        if self.ranks == 1:
            return tokens
        inside = tokens % self.period - self.rank * self.interleave
        return np.asarray(tokens // self.period * self.interleave + np.clip(inside, 0, self.interleave), np.int64)

    def tokens_at(self, places: Int64Array) -> Int64Array:
        """Return the token at each of ``places``."""
        if self.ranks == 1:
            return places
        turns, inside = np.divmod(places, self.interleave)
        return np.asarray(turns * self.period + self.rank * self.interleave + inside, np.int64)


#: What is looked at token by token. Runs of 1,024 tokens on 60 and 56 ranks recur after 860,160.
_LONGEST_PERIOD = 1 << 20

#: Every rank holds all tokens.
WHOLE = TokenSplit()


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """What two ranks both hold of every ``phases``-th unit, beginning with unit ``phase``."""

    phase: int
    here: Int64Array  # places, counted from the first one in the unit
    there: Int64Array


def unit_of(here: TokenSplit, here_rows: int, there: TokenSplit, there_rows: int) -> tuple[int, int]:
    """Return how many tokens a unit has, and after how many units two ranks share the same tokens of one again.

    What a rank holds of a unit is neighbouring rows of one kernel block. ``here_rows`` and ``there_rows``: rows of one.
    """
    unit = math.gcd(_uncut(here, here_rows), _uncut(there, there_rows))
    return unit, _common_period(unit, here, there) // unit


def _uncut(split: TokenSplit, rows: int) -> int:
    """Return the largest number of tokens, from any multiple of it on, that a rank keeps in one kernel block."""
    if split.ranks == 1:
        return rows
    return rows * split.ranks if rows % split.interleave == 0 else math.gcd(rows, split.interleave)


def shared_tokens(here: TokenSplit, there: TokenSplit, unit: int, phases: int) -> Iterator[SharedTokens]:
    """Yield what two ranks both hold, by unit, without units of which that is nothing. See ``unit_of``."""
    tokens = _both_hold(here, there, unit * phases)
    for mine in np.split(tokens, np.flatnonzero(np.diff(tokens // unit)) + 1) if len(tokens) else ():
        phase = int(mine[0]) // unit
        start = np.array([phase * unit])
        yield SharedTokens(phase, here.before(mine) - here.before(start), there.before(mine) - there.before(start))


def _both_hold(here: TokenSplit, there: TokenSplit, period: int) -> Int64Array:
    """Return those of the first ``period`` tokens, a multiple of both periods, that two ranks both hold, in order."""
    fewer, more = (here, there) if here.ranks > there.ranks else (there, here)
    tokens = fewer.tokens_at(np.arange(period // fewer.ranks, dtype=np.int64))
    return tokens[more.holds(tokens)]


def _common_period(unit: int, here: TokenSplit, there: TokenSplit) -> int:
    for split in (here, there):
        if split.interleave < 1 or not 0 <= split.rank < split.ranks:
            raise ValueError(f"rank {split.rank} of {split.ranks} cannot hold {split.interleave} tokens in a row")
    period = math.lcm(unit, here.period, there.period)
    if period > _LONGEST_PERIOD:
        raise ValueError(
            f"{here.ranks} ranks share tokens in runs of {here.interleave} here, and {there.ranks} in runs of "
            f"{there.interleave} on the remote engine: what both hold recurs after {period} tokens, of at most "
            f"{_LONGEST_PERIOD}; choose parallel sizes, and --cp-kv-cache-interleave-size, of which one divides the "
            "other"
        )
    return period


@lru_cache(maxsize=4096)  # peers state them
def share_tokens(here: TokenSplit, there: TokenSplit) -> bool:
    """Return whether there are tokens that two ranks both hold."""
    return len(_both_hold(here, there, _common_period(1, here, there))) > 0
