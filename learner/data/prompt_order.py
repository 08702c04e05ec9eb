"""The order in which prompts are leased: seeded permutations, the same after a restart and on any number of servers.

The only state is a position: the number of prompts leased since the run began.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.errors import SettingsError

# Positions of a block. Within a block weighted entries have their exact shares; each block has an order of its own.
_BLOCK = 10_000
# `order_name` of all rows as one list, shuffled.
USUAL_ORDER = "shuffled"


class Order(Protocol):
    """A sequence of prompts. No (epoch, index) is at two positions."""

    def at(self, position: int) -> tuple[int, int]:
        """Return (epoch, index of the prompt) at a position counted from the start of the run."""
        ...


def order_of(rows_by_entry: Sequence[int], weights: Sequence[float] | None, seed: int, is_shuffled: bool) -> Order:
    """Return the order of a data set's prompts. Without weights all entries are one list.

    Raises: SettingsError for an entry without rows, or with a share of less than one position in a block.
    """
    if weights is None:
        return PromptOrder(sum(rows_by_entry), seed, is_shuffled)
    return MixedOrder(rows_by_entry, weights, seed, is_shuffled)


def order_name(rows_by_entry: Sequence[int], weights: Sequence[float] | None, is_shuffled: bool) -> str:
    """Return a description of the order, apart from prompts and seed. All attempts of a run must have the same."""
    if weights is None:
        return USUAL_ORDER if is_shuffled else "as the rows lie"
    shares = zip(shares_of(rows_by_entry, weights), rows_by_entry, strict=True)
    entries = ", ".join(f"{share} of the {num_rows} rows of entry {i}" for i, (share, num_rows) in enumerate(shares, 1))
    return f"of {_BLOCK} prompts {entries}{'' if is_shuffled else ', as the rows lie'}"


class PromptOrder:
    """Every epoch a permutation of all prompts. position = epoch * num_prompts + place in the epoch.

    Example:
    >>> order = PromptOrder(num_prompts=3, seed=1)
    >>> [order.at(position) for position in range(4)]
    [(0, 0), (0, 1), (0, 2), (1, 2)]
    """

    def __init__(self, num_prompts: int, seed: int, is_shuffled: bool = True, *, entry: int | None = None) -> None:
        """entry: index of the weighted entry, from 0; None: the order of the whole set."""
        self._num_prompts = num_prompts
        self._is_shuffled = is_shuffled
        # A block's seed is (seed, 0, block).
        seeds = (seed,) if entry is None else (seed, 1 + entry)
        self._permutation = lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng((*seeds, epoch)).permutation(num_prompts)
        )

    def at(self, position: int) -> tuple[int, int]:
        """Return (epoch, index of the prompt) at a position counted from the start of the run."""
        epoch, place = divmod(position, self._num_prompts)
        return epoch, int(self._permutation(epoch)[place]) if self._is_shuffled else place


class MixedOrder:
    """Entries with weights. Each has epochs of its own, and its exact share of every 10,000 positions.

    Example: with rows_by_entry = [2, 100] and weights = [1, 3], 2,500 of the first 10,000 prompts belong to the first
    entry. Its two rows are then in epoch 1,250.
    """

    def __init__(
        self, rows_by_entry: Sequence[int], weights: Sequence[float], seed: int, is_shuffled: bool = True
    ) -> None:
        self._shares = shares_of(rows_by_entry, weights)
        self._begins = [0, *accumulate(rows_by_entry)]
        self._orders = [
            PromptOrder(num_rows, seed, is_shuffled, entry=entry) for entry, num_rows in enumerate(rows_by_entry)
        ]
        self._block = lru_cache(maxsize=2)(lambda block: _draw_block(self._shares, (seed, 0, block)))

    def at(self, position: int) -> tuple[int, int]:
        """Return (epoch of the prompt's entry, index of the prompt) at a position counted from the start of the run."""
        block, place = divmod(position, _BLOCK)
        entries, earlier = self._block(block)
        entry = int(entries[place])
        epoch, row = self._orders[entry].at(block * self._shares[entry] + int(earlier[place]))
        return epoch, self._begins[entry] + row


def shares_of(rows_by_entry: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return each entry's number of positions in a block: by weight, largest remainders first."""
    for entry, num_rows in enumerate(rows_by_entry):
        if not num_rows:
            raise SettingsError(f"data: entry {entry + 1} of data.train has no usable row. Leave it out.")
    exact = [weight / sum(weights) * _BLOCK for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda entry: (shares[entry] - exact[entry], entry))
    for entry in by_remainder[: _BLOCK - sum(shares)]:
        shares[entry] += 1
    if 0 in shares:
        entry = shares.index(0)
        raise SettingsError(
            f"settings: entry {entry + 1} of data.train has the weight {weights[entry]:g} of {sum(weights):g}, less "
            f"than one in {_BLOCK:,} prompts. Raise it, or leave the entry out."
        )
    return shares


def _draw_block(shares: Sequence[int], seed: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each position's entry, and the number of earlier positions of that entry in the block."""
    entries = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(shares)), shares))
    earlier = np.empty(_BLOCK, np.int64)
    for entry, share in enumerate(shares):
        earlier[entries == entry] = np.arange(share)
    return entries, earlier
