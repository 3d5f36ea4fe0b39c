# SPDX-License-Identifier: Apache-2.0
"""The definition of `selective_scan`: one token after another, in float32 (float64 for float64).

Arguments are the canonical ones of `api.py`: B and C are (b, t, g, n) or constant, (e, n).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from pallas_kernels import devices


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
) -> tuple[Float[Array, "b t e"], Inexact[Array, "b e n"] | Inexact[Array, "b s e n"]]:
    """See `selective_scan`."""
    (b, t, e), n = x.shape, A.shape[1]
    real = jnp.result_type(jnp.float32, *_real_dtypes(x, dt, A, B, C, D, z, dt_bias, initial_state))
    wide = jnp.result_type(real, A.dtype)
    A, B, C = A.astype(wide), _over_time(B, b, t, wide), _over_time(C, b, t, wide)
    if seq_idx is not None:
        # Nothing that padding holds reaches a sum or a gradient, not even NaN.
        x, dt, z, B, C = (_zero_padding(seq_idx, values) for values in (x, dt, z, B, C))
    step = dt.astype(real) + (0 if dt_bias is None else dt_bias.astype(real)[None, None])
    step = jax.nn.softplus(step) if dt_softplus else step
    documents = jnp.zeros((b, t), jnp.int32) if seq_idx is None else seq_idx
    states = jnp.zeros((b, num_documents or 1, e, n), wide)
    if initial_state is not None:
        states = initial_state.astype(wide).reshape(states.shape)

    def token(carry, inputs):
        states, last_document = carry
        x, step, B, C, document = inputs
        is_real = document >= 0
        # One state per document: continue that document's. One per row: continue the row's,
        # from zero where a real token's document differs from the last real token's.
        slot = jnp.maximum(document, 0) if num_documents else jnp.zeros_like(document)
        state = jnp.take_along_axis(states, slot[:, None, None, None], axis=1)[:, 0]
        if not num_documents:
            restart = is_real & (last_document >= 0) & (document != last_document)
            state = jnp.where(restart[:, None, None], 0, state)
        B, C = (jnp.repeat(weights, e // weights.shape[1], axis=1) for weights in (B, C))
        new = jnp.exp(step[..., None] * A[None]) * state + (step * x)[..., None] * B
        y = jnp.sum(new * C, axis=-1)
        y = 2 * y.real if jnp.iscomplexobj(y) else y
        chosen = is_real[:, None] & (jnp.arange(states.shape[1])[None] == slot[:, None])
        states = jnp.where(chosen[..., None, None], new[:, None], states)
        return (states, jnp.where(is_real, document, last_document)), y

    over_time = tuple(
        jnp.moveaxis(value, 1, 0) for value in (x.astype(real), step, B, C, documents)
    )
    last_document = jnp.full((b,), -1, documents.dtype)
    (states, _), y = jax.lax.scan(token, (states, last_document), over_time)
    y = jnp.moveaxis(y, 0, 1)
    y = y if D is None else y + x.astype(real) * D.astype(real)[None, None]
    y = y if z is None else y * jax.nn.silu(z.astype(real))
    y = y if seq_idx is None else jnp.where(documents[..., None] >= 0, y, 0)
    return y.astype(x.dtype), states if num_documents else states[:, 0]


def _real_dtypes(*arrays: Array | None) -> list[jnp.dtype]:
    return [jnp.finfo(array.dtype).dtype for array in arrays if array is not None]


def _over_time(
    weights: Inexact[Array, "b t g n"] | Inexact[Array, "e n"], b: int, t: int, dtype
) -> Inexact[Array, "b t g n"]:
    """Gives every token its B or C; a constant one has as many groups as channels."""
    if weights.ndim == 2:
        weights = jnp.broadcast_to(weights[None, None], (b, t, *weights.shape))
    return weights.astype(dtype)


def _zero_padding(seq_idx: Int[Array, "b t"], values: Array | None) -> Array | None:
    if values is None:
        return None
    is_real = (seq_idx >= 0).reshape(*seq_idx.shape, *[1] * (values.ndim - 2))
    return jnp.where(is_real, values, 0)
