# SPDX-License-Identifier: Apache-2.0
"""Lays packed rows out so that every chunk belongs to one document.

For `num_documents`: a state of its own enters and leaves every document, and where documents share
no chunk that is a matter of choosing the state of a chunk. Rows grow by less than one chunk per
document. Only indices are computed here; ids may come in any order.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Span(NamedTuple):
    """Where the tokens of each state's document lie.

    Attributes:
      first: (b, s). Index of the first token.
      last: (b, s). Index of the last.
      occurs: (b, s). Whether there are any; if not, the indices are those of some other token.
    """

    first: Int[Array, "b s"]
    last: Int[Array, "b s"]
    occurs: Bool[Array, "b s"]


class Placement(NamedTuple):
    """The new layout, u tokens a row, and the way there and back.

    Attributes:
      seq_idx: (b, u). Document of every place, -1 where no token lies.
      source: (b, u). Token at every place; any where none lies.
      target: (b, t). Place of every token; any for padding.
      is_real: (b, t). Whether a token is no padding.
      slots: (chunks, b). Document of every chunk; any for a chunk without tokens.
      span: Where each document lies in the new layout.
    """

    seq_idx: Int[Array, "b u"]
    source: Int[Array, "b u"]
    target: Int[Array, "b t"]
    is_real: Bool[Array, "b t"]
    slots: Int[Array, "chunks b"]
    span: Span

    def to_places(self, values: Array) -> Array:
        """(b, t, ...) → (b, u, ...); places without a token hold some other token's values."""
        return values[jnp.arange(values.shape[0])[:, None], self.source]

    def to_tokens(self, values: Array) -> Array:
        """(b, u, ...) → (b, t, ...); zero at padding."""
        values = values[jnp.arange(values.shape[0])[:, None], self.target]
        is_real = self.is_real.reshape(self.is_real.shape + (1,) * (values.ndim - 2))
        return jnp.where(is_real, values, 0)


def place(seq_idx: Int[Array, "b t"], num_documents: int, chunk_size: int) -> Placement:
    """Gives every document of a row chunks of its own, in the order of their ids."""
    b, t = seq_idx.shape
    s, q = num_documents, chunk_size
    num_chunks = (t + min(s, t) * (q - 1)) // q
    row, time = jnp.arange(b)[:, None], jnp.broadcast_to(jnp.arange(t)[None], (b, t))
    is_real = (seq_idx >= 0) & (seq_idx < s)
    document = jnp.where(is_real, seq_idx, s)
    counts = jnp.zeros((b, s + 1), jnp.int32).at[row, document].add(1)
    # A token's rank among those of its document: its place when sorted by document, less the
    # tokens of the documents before.
    order = jnp.argsort(document, axis=1, stable=True)
    rank = jnp.zeros((b, t), jnp.int32).at[row, order].set(time)
    rank = rank - (jnp.cumsum(counts, axis=1) - counts)[row, document]
    chunks = -(-counts[:, :s] // q)
    ends = jnp.cumsum(chunks, axis=1)
    first = jnp.append((ends - chunks) * q, jnp.zeros((b, 1), jnp.int32), axis=1)
    target = jnp.where(is_real, first[row, document] + rank, num_chunks * q)
    source = jnp.zeros((b, num_chunks * q), jnp.int32).at[row, target].set(time, mode="drop")
    ids = jnp.full((b, num_chunks * q), -1, jnp.int32).at[row, target].set(document, mode="drop")
    passed = ends[None] <= jnp.arange(num_chunks)[:, None, None]
    slots = jnp.minimum(jnp.sum(passed, axis=-1, dtype=jnp.int32), s - 1)
    occurs = counts[:, :s] > 0
    first = jnp.where(occurs, first[:, :s], 0)
    span = Span(first, jnp.maximum(first + counts[:, :s] - 1, 0), occurs)
    return Placement(ids, source, jnp.minimum(target, num_chunks * q - 1), is_real, slots, span)
