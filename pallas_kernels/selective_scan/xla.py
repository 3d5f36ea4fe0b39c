# SPDX-License-Identifier: Apache-2.0
"""`selective_scan` in plain JAX for any device, without ever holding all states.

Owns what surrounds the recurrence: widening, step sizes, padding, chunks, skip and gate, which
autodiff handles; `recurrence.py` is the scan and its gradient.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from pallas_kernels import devices, packing
from pallas_kernels.selective_scan import recurrence


def supports(device: devices.Device, arguments: dict) -> str | None:
    """Runs anywhere."""
    return None


def run(
    x: Float[Array, "b t e"],
    dt: Float[Array, "b t e"],
    A: Inexact[Array, "e n"],
    B: Inexact[Array, "b t g n"] | Inexact[Array, "e n"],
    C: Inexact[Array, "b t g n"] | Inexact[Array, "e n"],
    D: Float[Array, "e"] | None,
    z: Float[Array, "b t e"] | None,
    dt_bias: Float[Array, "e"] | None,
    dt_softplus: bool,
    seq_idx: Int[Array, "b t"] | None,
    initial_state: Inexact[Array, "b e n"] | Inexact[Array, "b s e n"] | None,
    num_documents: int | None,
    chunk_size: int | None = None,
    associative: bool | None = None,
) -> tuple[Float[Array, "b t e"], Inexact[Array, "b e n"] | Inexact[Array, "b s e n"]]:
    """See `selective_scan`.

    Args:
      chunk_size: Tokens whose states exist together; chosen by size and device when None.
      associative: See `recurrence.run`; chosen by device when None.
    """
    (b, t, e), n = x.shape, A.shape[1]
    arrays = (x, dt, A, B, C, D, z, dt_bias, initial_state)
    real = jnp.result_type(
        jnp.float32, *(jnp.finfo(v.dtype).dtype for v in arrays if v is not None)
    )
    wide = jnp.result_type(real, A.dtype)
    if associative is None:
        associative = devices.target_device().platform != "cpu"
    length = min(t, chunk_size or _chunk_size(b * e * n, associative))
    groups = next((weights.shape[2] for weights in (B, C) if weights.ndim == 4), 1)

    starts, documents = None, None
    if seq_idx is not None:
        found = packing.resolve(seq_idx)
        # Zeros keep whatever padding holds, even NaN, out of every sum and gradient.
        x, dt, z, B, C = (_real_tokens(found, v) for v in (x, dt, z, B, C))
        if num_documents is None:
            starts = _chunked(found.starts, length)
        else:
            documents = _documents(seq_idx, found, num_documents, length)
    inner = x.astype(real)
    step = dt.astype(real) + (0 if dt_bias is None else dt_bias.astype(real)[None, None])
    step = jax.nn.softplus(step) if dt_softplus else step
    # A step of 0 leaves the state as it is.
    step = step if seq_idx is None else _real_tokens(found, step)

    y, state = recurrence.run(
        associative,
        recurrence.Inputs(
            x=_chunked(inner, length).reshape(-1, length, b, groups, e // groups),
            step=_chunked(step, length).reshape(-1, length, b, groups, e // groups),
            A=_by_group(A.astype(wide), groups),
            B=_weights(B.astype(wide), groups, length),
            C=_weights(C.astype(wide), groups, length),
            initial=_initial(initial_state, (b, num_documents, e, n), groups, wide),
            starts=starts,
            documents=documents,
        ),
    )
    y = jnp.moveaxis(y.reshape(-1, b, e), 0, 1)[:, :t]
    y = y if D is None else y + inner * D.astype(real)[None, None]
    y = y if z is None else y * jax.nn.silu(z.astype(real))
    y = y if seq_idx is None else _real_tokens(found, y)
    state = jnp.swapaxes(state, -1, -2)
    return y.astype(x.dtype), state.reshape(*state.shape[:-3], e, n)


def _chunk_size(state_elements: int, associative: bool) -> int:
    """Tokens in a chunk: some 8 MB of states on a CPU, 256 MB elsewhere, within 16 and 256.

    Fewer than n would keep more states between chunks than there are inputs.
    """
    budget = 2**26 if associative else 2**21
    power = max(budget // state_elements, 1).bit_length() - 1
    return min(max(2**power, 16), 256 if associative else 128)


def _documents(
    seq_idx: Int[Array, "b t"], found: packing.Packing, num_documents: int, length: int
) -> recurrence.Documents:
    last = packing.last_tokens(seq_idx, num_documents)
    slot = jnp.maximum(found.carried_id, 0)
    ends = jnp.arange(seq_idx.shape[1])[None] == jnp.take_along_axis(last, slot, axis=1)
    return recurrence.Documents(
        begins=_chunked(found.begins, length),
        ends=_chunked(ends & found.is_real, length),
        slot=_chunked(slot, length),
    )


def _chunked(values: Array, length: int) -> Array:
    """(b, t, ...) to (c, l, b, ...), zeros after the end."""
    values = jnp.moveaxis(values, 1, 0)
    missing = -values.shape[0] % length
    if missing:
        values = jnp.pad(values, ((0, missing),) + ((0, 0),) * (values.ndim - 1))
    return values.reshape(-1, length, *values.shape[1:])


def _by_group(values: Inexact[Array, "*axes e n"], groups: int) -> Inexact[Array, "*axes g n q"]:
    *axes, e, n = values.shape
    return jnp.swapaxes(values.reshape(*axes, groups, e // groups, n), -1, -2)


def _weights(
    weights: Inexact[Array, "b t g n"] | Inexact[Array, "e n"], groups: int, length: int
) -> Inexact[Array, "c l b g n"] | Inexact[Array, "g n q"]:
    return _by_group(weights, groups) if weights.ndim == 2 else _chunked(weights, length)


def _initial(
    state: Array | None, sizes: tuple[int, int | None, int, int], groups: int, dtype: jnp.dtype
) -> Inexact[Array, "b g n q"] | Inexact[Array, "b s g n q"]:
    if state is None:
        state = jnp.zeros([size for size in sizes if size is not None])
    return _by_group(state.astype(dtype), groups)


def _real_tokens(found: packing.Packing, values: Array | None) -> Array | None:
    """Values over (b, t) with zeros at padding; what has no time axis as it is."""
    if values is None or values.ndim == 2:
        return values
    is_real = found.is_real.reshape(*found.is_real.shape, *[1] * (values.ndim - 2))
    return jnp.where(is_real, values, 0)
