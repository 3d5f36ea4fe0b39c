# SPDX-License-Identifier: Apache-2.0
"""What `seq_idx` means, in one place: documents, padding, and where states restart.

Owns the conversion from `cu_seqlens` and the small integer arrays that every op derives from
`seq_idx`; it knows nothing about states. All of it is (b, t) integer work, cheap beside an op.

The rules. A token is real when its id is at least 0; padding (a negative id) gives output 0 and
leaves every state as it is, so an op behaves as if the padding were not there. A real token
continues its document when the last real token before it has the same id, however much padding lies
between; otherwise it starts another document, also when that id was used earlier in the row. The
initial state of a row belongs to its first document, and its final state is the one after its last
real token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from pallas_kernels.validation import Arg, check


def seq_idx_from_cu_seqlens(
    cu_seqlens: Int[Array, "s+1"] | Int[Array, "b s+1"], length: int
) -> Int[Array, "b t"]:
    """Converts the bounds of packed documents to a document index for every token.

    Document i of a row holds its tokens cu_seqlens[i] ... cu_seqlens[i+1] - 1 and gets the id i. A
    document may be empty; its id then does not occur. Tokens from cu_seqlens[-1] on (and before
    cu_seqlens[0], normally 0) are padding and get -1.

    Mirrors the `cu_seqlens` of causal_conv1d, flash-attn and mamba_ssm. The operations here take
    only `seq_idx`.

    Args:
      cu_seqlens: (s+1,) for one packed row, or (b, s+1); int, not decreasing. NumPy arrays are
        checked for that, traced or device arrays are not.
      length: t, the tokens in a row.

    Returns:
      (b, t), int32; b = 1 for a `cu_seqlens` of one axis.

    Raises:
      TypeError: `cu_seqlens` is no integer array or `length` no int.
      ValueError: `cu_seqlens` has no or more than two axes, or fewer than 2 entries, or decreases.

    Example: `seq_idx_from_cu_seqlens(np.array([0, 2, 2, 5]), 6)` is [[0, 0, 2, 2, 2, -1]].
    """
    name = "seq_idx_from_cu_seqlens"
    check(name, Arg("cu_seqlens", cu_seqlens, "s+1 | b s+1", "int"))
    if isinstance(length, bool) or not isinstance(length, int | np.integer):
        raise TypeError(f"{name}: length must be an int; got {length!r}")
    if length < 1:
        raise ValueError(f"{name}: length must be at least 1; got {length}")
    if cu_seqlens.shape[-1] < 2:
        raise ValueError(f"{name}: cu_seqlens must have at least 2 entries; got {cu_seqlens.shape}")
    if isinstance(cu_seqlens, np.ndarray) and np.any(np.diff(cu_seqlens) < 0):
        raise ValueError(f"{name}: cu_seqlens must not decrease; got {cu_seqlens.tolist()}")
    bounds = jnp.atleast_2d(jnp.asarray(cu_seqlens, jnp.int32))
    row = jnp.arange(bounds.shape[0])[:, None]
    ends = jnp.zeros((bounds.shape[0], length), jnp.int32)
    ends = ends.at[row, bounds[:, 1:]].add(1, mode="drop")
    time = jnp.arange(length, dtype=jnp.int32)[None]
    is_real = (time >= bounds[:, :1]) & (time < bounds[:, -1:])
    return jnp.where(is_real, jnp.cumsum(ends, axis=1), -1)


class Packing(NamedTuple):
    """What `seq_idx` says about each token; all int32 or bool. See the rules in the module.

    With d = `document`, the whole of the state logic of a scan is

        token s contributes to token t >= s      iff  is_real[s] and d[s] == d[t]
        the row's initial state reaches token t  iff  d[t] == 0
        a chunk's incoming state reaches token t iff  d[t] == d[last token before the chunk]
                                                      (0 before the first chunk)
        a chunk's outgoing state holds token s   iff  is_real[s] and d[s] == d[chunk's last token]

    because padding carries the number of the document before it. Neighbouring comparisons suffice:
    d never decreases. A step of a token-by-token loop is: `starts` zeroes the state, then the
    token is applied if `is_real`.

    Attributes:
      is_real: (b, t). Whether the id is at least 0.
      document: (b, t). 0 for the row's first document, 1 for its second, ...; counted, unlike ids.
        Padding carries the number before it; 0 before the row's first real token.
      starts: (b, t). First real token of every document but the row's first: here a state
        restarts from zero.
      begins: (b, t). First real token of every document, the row's first included: here the state
        of a document of its own (`num_documents`) is taken up.
      carried_id: (b, t). Id of the last real token at or before t; -1 where there is none.
      position: (b, t). Real tokens of the same document before t: 0 at its first.
      previous_real: (b, t). Index of the last real token strictly before t, whatever its document;
        -1 where there is none.
      last_real: (b,). Index of the row's last real token; -1 in a row of nothing but padding.
    """

    is_real: Bool[Array, "b t"]
    document: Int[Array, "b t"]
    starts: Bool[Array, "b t"]
    begins: Bool[Array, "b t"]
    carried_id: Int[Array, "b t"]
    position: Int[Array, "b t"]
    previous_real: Int[Array, "b t"]
    last_real: Int[Array, "b"]


def resolve(seq_idx: Int[Array, "b t"]) -> Packing:
    """Derives from `seq_idx` what ops need; what is not used costs nothing under jit."""
    b, t = seq_idx.shape
    seq_idx = seq_idx.astype(jnp.int32)
    is_real = seq_idx >= 0
    time = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], (b, t))
    latest_real = jax.lax.cummax(jnp.where(is_real, time, -1), axis=1)
    carried_id = jnp.where(
        latest_real < 0, -1, jnp.take_along_axis(seq_idx, jnp.maximum(latest_real, 0), axis=1)
    )
    previous_real = _shift_right(latest_real)
    begins = is_real & (seq_idx != _shift_right(carried_id))
    starts = begins & (previous_real >= 0)
    real_before = jnp.cumsum(is_real, axis=1, dtype=jnp.int32) - is_real
    # real_before never decreases, so its largest value at a beginning is that of the latest one.
    at_beginning = jax.lax.cummax(jnp.where(begins, real_before, 0), axis=1)
    return Packing(
        is_real=is_real,
        document=jnp.cumsum(starts, axis=1, dtype=jnp.int32),
        starts=starts,
        begins=begins,
        carried_id=carried_id,
        position=real_before - at_beginning,
        previous_real=previous_real,
        last_real=latest_real[:, -1],
    )


def last_tokens(seq_idx: Int[Array, "b t"], num_documents: int) -> Int[Array, "b s"]:
    """Returns the index of the last token of each document id 0 ... s-1; -1 where it is absent."""
    b, t = seq_idx.shape
    row = jnp.arange(b)[:, None]
    # Negative ids would wrap around; they go where "drop" drops them.
    slot = jnp.where(seq_idx < 0, num_documents, seq_idx)
    time = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], (b, t))
    empty = jnp.full((b, num_documents), -1, jnp.int32)
    return empty.at[row, slot].max(time, mode="drop")


def _shift_right(values: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """values[t-1] at t, and -1 at the first token."""
    return jnp.pad(values[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
