# SPDX-License-Identifier: Apache-2.0
"""Packed rows with a state per document, brought into a form where a chunk has one document.

With `num_documents` the tokens of each document are moved together and each document starts a new
chunk, so that a chunk takes up one state and leaves one behind. t tokens of s documents then need
t + s * (q - 1) places at most. The moves are gathers in both directions, also backward.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Alignment(NamedTuple):
    """Where tokens go; places without a token hold zeros.

    Attributes:
      place: (b, t). The place of each token; the number of places for padding.
      token: (b, places). The token in each place; t where there is none.
      slot: (b, c). The document of each chunk; any, for a chunk without tokens.
    """

    place: Int[Array, "b t"]
    token: Int[Array, "b places"]
    slot: Int[Array, "b c"]


def align(seq_idx: Int[Array, "b t"], num_documents: int, chunk_size: int) -> Alignment:
    """Gives the documents of each row, in the order of their ids, whole chunks."""
    (b, t), s, q = seq_idx.shape, num_documents, chunk_size
    num_chunks = -(-(t + s * (q - 1)) // q)
    is_own = seq_idx[..., None] == jnp.arange(s, dtype=seq_idx.dtype)[None, None]
    tokens_so_far = jnp.cumsum(is_own, axis=1, dtype=jnp.int32)
    chunks = -(-tokens_so_far[:, -1] // q)
    end = jnp.cumsum(chunks, axis=1)
    place = (end - chunks)[:, None] * q + tokens_so_far - 1
    place = jnp.sum(jnp.where(is_own, place, 0), axis=-1)
    place = jnp.where(jnp.any(is_own, axis=-1), place, num_chunks * q)
    time = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], (b, t))
    token = jnp.full((b, num_chunks * q), t, jnp.int32)
    token = token.at[jnp.arange(b)[:, None], place].set(time, mode="drop")
    is_past = end[:, None] <= jnp.arange(num_chunks, dtype=jnp.int32)[None, :, None]
    slot = jnp.minimum(jnp.sum(is_past, axis=-1, dtype=jnp.int32), s - 1)
    return Alignment(place, token, slot)


def to_places(values: Float[Array, "b t ..."], alignment: Alignment) -> Float[Array, "b u ..."]:
    """Moves tokens to their places; the rest is zero."""
    return _move(values, alignment.token, alignment.place)


def to_tokens(values: Float[Array, "b u ..."], alignment: Alignment) -> Float[Array, "b t ..."]:
    """Moves tokens back from their places; padding is zero."""
    return _move(values, alignment.place, alignment.token)


@jax.custom_vjp
def _move(values, source, target):
    """values[source], zero where that is out of range; `target` is the way back."""
    source = source.reshape(source.shape + (1,) * (values.ndim - 2))
    return jnp.take_along_axis(values, source, axis=1, mode="fill", fill_value=0)


def _move_forward(values, source, target):
    return _move(values, source, target), (source, target)


def _move_backward(residuals, cotangent):
    source, target = residuals
    return _move(cotangent, target, source), None, None


_move.defvjp(_move_forward, _move_backward)
