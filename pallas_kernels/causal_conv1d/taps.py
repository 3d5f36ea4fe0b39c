# SPDX-License-Identifier: Apache-2.0
"""Which rows the taps of a packed convolution read: integer work, independent of the channels.

Rows are counted in [initial states, x] along time: first the w-1 rows of each initial state, then
the t tokens. -1 stands for "nothing, read zero".
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels import packing


class Reads(NamedTuple):
    """Rows of [initial states, x].

    Attributes:
      taps: (b, t, w). What tap j of token t reads; all -1 for padding.
      final: (b, w-1), or (b, s * (w-1)) with a state per document. What the final states hold.
    """

    taps: Int[Array, "b t w"]
    final: Int[Array, "b r"]


def resolve(
    seq_idx: Int[Array, "b t"], w: int, has_states: bool, num_documents: int | None
) -> Reads:
    """Says what every tap and every row of the final states reads."""
    packed = packing.resolve(seq_idx)
    if num_documents is None:
        state = jnp.where(packed.document == 0, 0, -1)
        last = packed.last_real[:, None]
        last_state = jnp.where(last < 0, 0, _at(state, last))
    else:
        state = packed.carried_id
        last = packing.last_tokens(seq_idx, num_documents)
        last_state = jnp.broadcast_to(jnp.arange(num_documents)[None], last.shape)
    state = state if has_states else jnp.full_like(state, -1)
    last_state = last_state if has_states else jnp.full_like(last_state, -1)
    num_states = (num_documents or 1) * (w - 1) if has_states else 0

    # Walk back one real token at a time; `count` of them were walked so far.
    taps, final = [], []
    here = jnp.broadcast_to(jnp.arange(seq_idx.shape[1], dtype=jnp.int32)[None], seq_idx.shape)
    num_before = packed.position
    num_last = jnp.where(last < 0, 0, _at(packed.position, last) + 1)
    for count in range(w):
        row = _state_row(state, num_before - count, w)
        taps.append(jnp.where(count <= num_before, here + num_states, row))
        here = _at(packed.previous_real, here)
    for count in range(w - 1):
        row = _state_row(last_state, num_last - 1 - count, w)
        final.append(jnp.where(count < num_last, last + num_states, row))
        last = _at(packed.previous_real, last)
    taps = jnp.stack(taps[::-1], axis=-1)
    taps = jnp.where(packed.is_real[..., None], taps, -1)
    b = seq_idx.shape[0]
    final = jnp.stack(final[::-1], axis=-1) if final else jnp.zeros((b, 0, 0), jnp.int32)
    return Reads(taps, final.reshape(b, -1))


def readers(taps: Int[Array, "b t w"], num_states: int) -> Int[Array, "b r w"]:
    """Turns `taps` around: the token whose tap j reads a row, -1 for none (there is never more)."""
    b, t, w = taps.shape
    row, time, tap = jnp.ix_(*[jnp.arange(size, dtype=jnp.int32) for size in (b, t, w)])
    nobody = jnp.full((b, num_states + t, w), -1, jnp.int32)
    # Negative rows would wrap around; they go where "drop" drops them.
    target = jnp.where(taps < 0, num_states + t, taps)
    return nobody.at[row, target, tap].set(
        jnp.broadcast_to(time, taps.shape), mode="drop", unique_indices=False
    )


def _state_row(state: Int[Array, "b q"], distance: Array, w: int) -> Int[Array, "b q"]:
    """The row `distance` (-1 the latest, -2 before it, ...) of a state; -1 without a state."""
    return jnp.where(state < 0, -1, state * (w - 1) + (w - 1) + distance)


def _at(values: Int[Array, "b t"], index: Int[Array, "b q"]) -> Int[Array, "b q"]:
    """values[index] along time, for any index: what negative ones give is not used."""
    return jnp.take_along_axis(values, jnp.maximum(index, 0), axis=1)
