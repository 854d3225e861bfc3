"""Tokens for many rows of logits at once, and the same rows' top-k records. numpy only; nothing sorts a vocabulary.

A row's distribution is `rules.sampling.warp`'s. With the same uniform number the token is its Categorical's, up to rounding.
The most probable columns are selected, the nucleus is cut among them, and the kept ones are inverted in the order of their ids.
A row whose nucleus reaches beyond them goes through `warp` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from edgespec_runtime.rules.sampling import RandomSource, Warp, warp
from numpy.typing import NDArray

from edgespec.core.errors import NoNumbers
from edgespec_recipes.stored.top_k import LEAST, record_type

Floats = NDArray[np.float32]

SELECTED = 128  # columns among which a nucleus is looked for; the torch path begins with as many (distributions.NUCLEUS_GUESSES)
ROWS = 8  # at a time: 8 rows of 49,152 columns stay in a processor's cache
_GROUP = 32


def draw_rows(
    logits: Floats, temperatures: Sequence[float], cuts: Warp, sources: Sequence[RandomSource], top_k: int = 0
) -> tuple[list[int], np.ndarray]:
    """(a token for each of the rows of logits [n, V], their records [n] of `record_type(top_k, V)`; [0] where top_k is 0).

    Row i has temperature i and draws one number from source i, or none where its distribution has one token. Records are of the
    distribution at temperature 1 without cuts, whatever the token was drawn from. `cuts`: top_p and min_p of all rows.
    Raises NoNumbers where logits are NaN.
    """
    columns = logits.shape[1]
    records = np.empty(len(logits) if top_k else 0, record_type(top_k, columns))
    tokens: list[int] = []
    for start in range(0, len(logits), ROWS):
        part = slice(start, start + ROWS)
        heat = np.asarray(temperatures[part], np.float32)
        if np.isnan(logits[part].max(1)).any():
            raise NoNumbers("the target")
        if not (top_k or heat.any()):
            tokens += logits[part].argmax(1).tolist()
            continue
        ids, values = largest(logits[part], min(columns, max(SELECTED, top_k)))
        if top_k:
            _fill(records[part], logits[part], ids[:, :top_k], values[:, :top_k])
        tokens += _drawn(logits[part], heat, ids, values, cuts, sources[part])
    return tokens, records


def largest(logits: Floats, count: int) -> tuple[NDArray[np.int64], Floats]:
    """(ids, values) [n, count] of each row's `count` largest entries, falling; the lower id first among equals.

    The largest entries of `count` disjoint groups are `count` entries, so nothing below the least of them is wanted.
    """
    rows, columns = logits.shape
    groups = columns // _GROUP
    if groups < 2 * count:
        ids = np.argsort(-logits, axis=1, kind="stable")[:, :count]
        return ids, np.take_along_axis(logits, ids, 1)
    maxima = logits[:, : groups * _GROUP].reshape(rows, _GROUP, groups).max(1)
    maxima.partition(groups - count, axis=1)
    # ten times as fast as nonzero of two axes
    flat = np.flatnonzero(logits >= maxima[:, groups - count, None])
    owners, places = np.divmod(flat, columns)
    sizes = np.bincount(owners, minlength=rows)
    column = np.arange(len(owners)) - np.repeat(sizes.cumsum() - sizes, sizes)
    found = np.full((rows, sizes.max()), -np.inf, np.float32)
    found[owners, column] = logits[owners, places]
    where = np.zeros(found.shape, np.int64)
    where[owners, column] = places
    order = np.argsort(-found, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(where, order, 1), np.take_along_axis(found, order, 1)


def _fill(records: np.ndarray, logits: Floats, ids: NDArray[np.int64], values: Floats) -> None:
    """What `top_k.compress` gives: the others' mass is summed by itself, since 1 − Σ would keep nothing of a small one."""
    top = values[:, :1]
    others = logits - top
    np.exp(others, out=others)
    np.put_along_axis(others, ids, 0.0, 1)
    rest = others.sum(1)
    total = np.log(rest + np.exp(values - top).sum(1))
    records["ids"], records["log_p"] = ids, values - top - total[:, None]
    with np.errstate(divide="ignore"):  # nothing is left where the k tokens are all
        records["log_rest"] = np.maximum(np.log(rest) - total, LEAST)


def _drawn(
    logits: Floats,
    heat: Floats,
    ids: NDArray[np.int64],
    values: Floats,
    cuts: Warp,
    sources: Sequence[RandomSource],
) -> list[int]:
    """The tokens of a few rows whose largest entries are `ids` and `values`."""
    tokens: list[int] = ids[:, 0].tolist()
    warm = np.flatnonzero(heat)
    if not len(warm):
        return tokens
    scale = heat[warm, None]
    weights = np.exp((values[warm] - values[warm, :1]) / scale)
    kept = weights >= np.float32(cuts.min_p)  # the largest weight is 1
    # all that is kept is among these columns
    known = np.full(len(warm), ids.shape[1] == logits.shape[1]) | ~kept[:, -1]
    if cuts.top_p < 1.0:
        every = logits[warm]
        every -= values[warm, :1]
        every /= scale
        total = np.exp(every, out=every).sum(1, keepdims=True)
        mass = (weights / total).cumsum(1, dtype=np.float64)
        ahead = np.concatenate([np.zeros((len(warm), 1)), mass[:, :-1]], 1)
        kept &= ahead < cuts.top_p  # the nucleus: the tokens ahead of each have less mass than wanted
        known |= mass[:, -1] >= cuts.top_p
    for place, row in enumerate(warm.tolist()):
        if not known[place]:
            distribution = warp(logits[row], replace(cuts, temperature=float(heat[row])))
            tokens[row] = distribution.sample(sources[row])
            continue
        mine = np.flatnonzero(kept[place])
        if len(mine) > 1:
            order = mine[ids[row, mine].argsort()]
            heights = weights[place, order].cumsum(dtype=np.float64)
            drawn = heights.searchsorted(sources[row].random() * heights[-1], side="right")
            tokens[row] = int(ids[row, order[min(int(drawn), len(order) - 1)]])
    return tokens
