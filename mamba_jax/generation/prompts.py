# SPDX-License-Identifier: Apache-2.0
"""Prompts of unequal length in one form: each row's real tokens moved to its right end.

Then the last column holds every row's last token, and cutting the columns into pieces never parts
a row's end from the others'. All of this is numpy, before anything is compiled.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Prompts:
    """A batch of prompts, padding on the left.

    Attributes:
      ids: (b, t), int32. Padding holds 0.
      seq_idx: (b, t), int32, 0 for tokens and -1 for padding; None when there is no padding.
      lengths: (b,), int32. Real tokens per row.
    """

    ids: np.ndarray
    seq_idx: np.ndarray | None
    lengths: np.ndarray

    def pieces(self, size: int) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """Cuts the columns into pieces of `size`, the first one shorter if need be."""
        time = self.ids.shape[1]
        starts = [0, *range(time % size or size, time, size)]
        ends = [*starts[1:], time]
        return [
            (
                self.ids[:, start:end],
                None if self.seq_idx is None else self.seq_idx[:, start:end],
            )
            for start, end in zip(starts, ends, strict=True)
        ]

    def real_ids(self, row: int) -> list[int]:
        """The tokens of one row."""
        return self.ids[row, self.ids.shape[1] - int(self.lengths[row]) :].tolist()


def canonical(
    input_ids: np.ndarray | Sequence[Sequence[int]],
    vocab_size: int,
    *,
    prompt_mask: np.ndarray | None = None,
    lengths: np.ndarray | Sequence[int] | None = None,
) -> Prompts:
    """Checks prompts and moves their tokens to the right end of each row.

    Args:
      input_ids: (b, t), integers, t >= 1; or a list of rows of unequal length.
      vocab_size: Ids must be below it.
      prompt_mask: (b, t), bool. True for tokens, False for padding, wherever it is.
      lengths: (b,), integers. Tokens of each row, the padding being on the right.

    Raises:
      ValueError: shapes disagree, a row has no token, an id is outside the vocabulary.
      TypeError: ids are not integers.
    """
    if isinstance(input_ids, list | tuple) and prompt_mask is None and lengths is None:
        input_ids, lengths = _ragged(input_ids)
    ids = np.asarray(input_ids)
    if ids.ndim != 2 or 0 in ids.shape:
        raise ValueError(
            f"input_ids must have shape (b, t) with b >= 1 and t >= 1; got {tuple(ids.shape)}"
        )
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"input_ids must be integers; got {ids.dtype}")
    mask = _mask(ids.shape, prompt_mask, lengths)
    counts = mask.sum(axis=1).astype(np.int32)
    if not counts.all():
        row = int(np.argmin(counts))
        raise ValueError(f"every prompt must have at least 1 token; row {row} has none")
    outside = mask & ((ids < 0) | (ids >= vocab_size))
    if outside.any():
        row, column = (int(i[0]) for i in np.nonzero(outside))
        raise ValueError(
            f"input_ids must be in 0 ... {vocab_size - 1}; got {ids[row, column]} "
            f"at [{row}, {column}]"
        )
    # A stable sort of False before True keeps the order of the tokens.
    order = np.argsort(mask, axis=1, kind="stable")[:, ids.shape[1] - int(counts.max()) :]
    mask = np.take_along_axis(mask, order, axis=1)
    ids = np.where(mask, np.take_along_axis(ids, order, axis=1), 0).astype(np.int32)
    seq_idx = None if mask.all() else np.where(mask, 0, -1).astype(np.int32)
    return Prompts(ids, seq_idx, counts)


def _ragged(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    rows = [np.asarray(row) for row in rows]
    for index, row in enumerate(rows):
        if row.ndim != 1 or not row.size:
            raise ValueError(f"every prompt must be a row of at least 1 token; row {index} is not")
    lengths = np.array([row.size for row in rows])
    if not rows:
        raise ValueError("input_ids must hold at least one prompt; got none")
    ids = np.zeros((len(rows), lengths.max()), np.result_type(*rows))
    for index, row in enumerate(rows):
        ids[index, : row.size] = row
    return ids, lengths


def _mask(
    shape: tuple[int, int], prompt_mask: np.ndarray | None, lengths: np.ndarray | None
) -> np.ndarray:
    if prompt_mask is not None and lengths is not None:
        raise ValueError("give prompt_mask or lengths, not both")
    if prompt_mask is not None:
        mask = np.asarray(prompt_mask).astype(bool)
        if mask.shape != shape:
            raise ValueError(
                f"prompt_mask must have the shape of input_ids, {shape}; got {mask.shape}"
            )
        return mask
    if lengths is None:
        return np.ones(shape, bool)
    lengths = np.asarray(lengths)
    if lengths.shape != shape[:1] or (lengths > shape[1]).any():
        raise ValueError(
            f"lengths must be {shape[0]} numbers of at most {shape[1]}; got {lengths.tolist()}"
        )
    return np.arange(shape[1])[None, :] < lengths[:, None]
