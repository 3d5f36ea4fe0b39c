# SPDX-License-Identifier: Apache-2.0
"""Time in chunks: splitting it, decays inside a chunk without cancellation, chunk sizes.

Shared by the chunked forms of the recurrences with one decay per token and head (`ssd`,
`mamba3_scan`); knows nothing of B, C or states.

Why no cumulative sum is subtracted here. The decay from token s to token q is the exponential of
the sum of the log decays of the tokens s+1 ... q. As a difference of one cumulative sum it loses,
to rounding, as many digits as the sum has grown, and everything behind a token that forgets
(log decay -1000 and below); the gradient of the log decays, a difference of row and column sums,
loses the same. So a chunk is cut into sub-blocks of `SUB_BLOCK` tokens, and a sum is put together
from pieces that are added, never subtracted:

    s and q in one sub-block    summed directly, under a mask
    s in an earlier one         (after s to its end) + (whole sub-blocks between) + (up to q)

All pieces are sums of numbers <= 0, each exponential is <= 1, and their product is the decay.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from pallas_kernels import devices

SUB_BLOCK = 16
# exp of it is 0 in float64 and float32 alike: at or below it, a log decay forgets everything.
FORGETS = -1000.0
# Measured on CPU (see ssd/README.md); on a GPU the q x q matrices and the chunk states, whose
# sizes go with q and 1/q, weigh about the same at 128 for headdim 64 and d_state 128.
_CHUNK_SIZES = {"cpu": 64, "gpu": 128}


def choose_chunk_size(device: devices.Device, t: int, chunk_size: int | None) -> int:
    """Returns the caller's `chunk_size`, or the device's, and no more than t."""
    return min(t, chunk_size or _CHUNK_SIZES.get(device.platform, 128))


def chunks_per_block(device: devices.Device, num_chunks: int, elements_per_chunk: int) -> int:
    """Returns how many chunks one round of a loop over time handles.

    Args:
      device: Where it runs.
      num_chunks: Chunks in the sequence.
      elements_per_chunk: Of the largest array a chunk makes, all rows and heads together.

    On a CPU a round should stay in the caches; a GPU wants few, large rounds, in bounded memory.
    """
    budget, most = (2**19, 1) if device.platform == "cpu" else (2**28, 16)
    k = max(1, min(num_chunks, most, budget // elements_per_chunk))
    # As many rounds as that takes, all of the same length.
    return -(-num_chunks // -(-num_chunks // k))


def pad_time(values: Float[Array, "b t ..."], multiple: int) -> Float[Array, "b t+ ..."]:
    """Appends zeros until the time axis (1) is a multiple of `multiple`.

    A zero step and zero log decay leave a state as it is, so that padded tokens do nothing.
    """
    missing = -values.shape[1] % multiple
    if not missing:
        return values
    return jnp.pad(values, [(0, 0), (0, missing)] + [(0, 0)] * (values.ndim - 2))


def split_time(values: Float[Array, "b t ..."], chunk_size: int) -> Float[Array, "b c q ..."]:
    """Cuts the time axis (1) into chunks of `chunk_size`, the last one padded with zeros."""
    values = pad_time(values, chunk_size)
    return values.reshape(values.shape[0], -1, chunk_size, *values.shape[2:])


def join_time(values: Float[Array, "b c q ..."], t: int) -> Float[Array, "b t ..."]:
    """Undoes `split_time` and drops its padding."""
    b, c, q = values.shape[:3]
    return values.reshape(b, c * q, *values.shape[3:])[:, :t]


def bounded_log_decay(
    log_decay: Float[Array, "b t h"], starts: Bool[Array, "b t"] | None = None
) -> Float[Array, "b t h"]:
    """Makes log decays fit for the sums below, and cuts them where a document starts.

    No log decay below `FORGETS` remains (its exponential was 0 already), and every token of
    `starts` gets `FORGETS`: nothing before it, state or gradient, passes it. With that, documents
    need no masks anywhere else in a chunked form.
    """
    log_decay = jnp.where(log_decay < FORGETS, FORGETS, log_decay)
    return log_decay if starts is None else jnp.where(starts[..., None], FORGETS, log_decay)


def sums_through(values: Float[Array, "... q"]) -> Float[Array, "... q"]:
    """Cumulative sums: at q, the sum over the tokens 0 ... q of the chunk."""
    return _times(values, np.tri(values.shape[-1]).T)


def sums_after(values: Float[Array, "... q"]) -> Float[Array, "... q"]:
    """At s, the sum over the tokens s+1 ... of the chunk; its exponential is the decay to its end.

    Added up from the end, not subtracted from the total.
    """
    return _times(values, np.tri(values.shape[-1], k=-1))


def sums_from(values: Float[Array, "... q"]) -> Float[Array, "... q"]:
    """At k, the sum over the tokens k ... of the chunk: the transpose of `sums_through`."""
    return _times(values, np.tri(values.shape[-1]))


def sums_before(values: Float[Array, "... q"]) -> Float[Array, "... q"]:
    """At k, the sum over the tokens 0 ... k-1: the transpose of `sums_after`."""
    return _times(values, np.tri(values.shape[-1], k=-1).T)


@jax.custom_vjp
def segment_decays(log_decay: Float[Array, "... q"]) -> Float[Array, "... q q"]:
    """The decay from every token of a chunk to every later one.

    Args:
      log_decay: (..., q), float32 or float64, at most 0 and at least `FORGETS` per token.

    Returns:
      (..., q, q). At [i, j] exp(sum of log_decay over j+1 ... i): 1 on the diagonal, 0 above it.
    """
    *lead, q = log_decay.shape
    if q <= SUB_BLOCK:
        return _direct_decays(log_decay)
    blocks = _sub_blocks(log_decay)
    num, m = blocks.shape[-2:]
    diagonal = _direct_decays(blocks)
    before = jnp.exp(sums_through(blocks))
    after = jnp.exp(sums_after(blocks))
    between = _decays_between(jnp.sum(blocks, axis=-1))
    decays = (
        before[..., :, :, None, None]
        * between[..., :, None, :, None]
        * after[..., None, None, :, :]
    )
    on_diagonal = _mask(np.eye(num, dtype=bool)[:, None, :, None], decays)
    decays = jnp.where(on_diagonal, diagonal[..., :, :, None, :], decays)
    return decays.reshape(*lead, num * m, num * m)[..., :q, :q]


def segment_sums_transpose(cotangent: Float[Array, "... q q"]) -> Float[Array, "... q"]:
    """Takes cotangents of the exponents of `segment_decays` to those of `log_decay`.

    Args:
      cotangent: (..., q, q), of the sums over j+1 ... i at [i, j], that is (cotangent of the
        decay) * decay; zero above the diagonal; the diagonal itself does not matter.

    Returns:
      (..., q): at k, the sum of `cotangent` over i >= k > j, by additions only.
    """
    *lead, q = cotangent.shape[:-1]
    if q <= SUB_BLOCK:
        return _direct_transpose(cotangent)
    missing = -q % SUB_BLOCK
    if missing:
        cotangent = jnp.pad(cotangent, [(0, 0)] * len(lead) + [(0, missing)] * 2)
    num, m = (q + missing) // SUB_BLOCK, SUB_BLOCK
    cotangent = cotangent.reshape(*lead, num, m, num, m)
    diagonal = jnp.stack([cotangent[..., i, :, i, :] for i in range(num)], axis=-3)
    below = np.tri(num, k=-1, dtype=bool)
    over_sources = jnp.sum(cotangent, axis=-1)
    over_sources = jnp.where(_mask(below[:, None, :], over_sources), over_sources, 0)
    over_targets = jnp.sum(cotangent, axis=-3)
    over_targets = jnp.where(_mask(below[:, :, None], over_targets), over_targets, 0)
    out = (
        _direct_transpose(diagonal)
        + sums_from(jnp.sum(over_sources, axis=-1))
        + sums_before(jnp.sum(over_targets, axis=-3))
        + _between_transpose(jnp.sum(over_sources, axis=-2))[..., None]
    )
    return out.reshape(*lead, num * m)[..., :q]


def _forward(log_decay):
    decays = segment_decays(log_decay)
    return decays, decays


def _backward(decays, cotangent):
    return (segment_sums_transpose(cotangent * decays),)


segment_decays.defvjp(_forward, _backward)


def _direct_decays(values: Float[Array, "... m"]) -> Float[Array, "... m m"]:
    m = values.shape[-1]
    sums = _times(values, _inside(m)).reshape(*values.shape[:-1], m, m)
    # The mask goes inside the exponent: outside, its gradient would be 0 * inf.
    return jnp.exp(jnp.where(_mask(np.tri(m, dtype=bool), sums), sums, -jnp.inf))


def _direct_transpose(cotangent: Float[Array, "... m m"]) -> Float[Array, "... m"]:
    m = cotangent.shape[-1]
    return _times(cotangent.reshape(*cotangent.shape[:-2], m * m), _inside(m).T)


def _decays_between(totals: Float[Array, "... k"]) -> Float[Array, "... k k"]:
    """At [i, j], i > j, the decay over the sub-blocks j+1 ... i-1; 0 elsewhere."""
    shifted = segment_decays(totals)[..., :-1, :]
    return jnp.pad(shifted, [(0, 0)] * (totals.ndim - 1) + [(1, 0), (0, 0)])


def _between_transpose(cotangent: Float[Array, "... k k"]) -> Float[Array, "... k"]:
    shifted = jnp.pad(cotangent[..., 1:, :], [(0, 0)] * (cotangent.ndim - 2) + [(0, 1), (0, 0)])
    return segment_sums_transpose(shifted)


def _sub_blocks(values: Float[Array, "... q"]) -> Float[Array, "... k m"]:
    missing = -values.shape[-1] % SUB_BLOCK
    values = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
    return values.reshape(*values.shape[:-1], -1, SUB_BLOCK)


@functools.lru_cache
def _inside(m: int) -> np.ndarray:
    """(m, m * m): 1 at [k, (i, j)] where j < k <= i."""
    k, i, j = np.ogrid[:m, :m, :m]
    return ((j < k) & (k <= i)).reshape(m, m * m).astype(np.float32)


def _times(values: Float[Array, "... a"], matrix: np.ndarray) -> Float[Array, "... c"]:
    """`values @ matrix` for a matrix of zeros and ones, in full precision."""
    matrix = jnp.asarray(matrix, values.dtype)
    return jnp.matmul(values, matrix, precision=jax.lax.Precision.HIGHEST)


def _mask(mask: np.ndarray, like: Array) -> Bool[Array, "..."]:
    """`mask` with leading axes of 1, to broadcast against `like`."""
    return jnp.asarray(mask.reshape((1,) * (like.ndim - mask.ndim) + mask.shape))
