# SPDX-License-Identifier: Apache-2.0
"""The definition of `ssd`: one token after another, in float32 (float64 if any array is)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import devices, packing
from pallas_kernels.ssd.step_size import step_size


def supports(device: devices.Device, arguments: dict) -> str | None:
    """Runs anywhere."""
    return None


def run(
    x: Float[Array, "b t h p"],
    dt: Float[Array, "b t h"],
    A: Float[Array, "h"],
    B: Float[Array, "b t g n"],
    C: Float[Array, "b t g n"],
    D: Float[Array, "h"] | Float[Array, "h p"] | None,
    z: Float[Array, "b t h p"] | None,
    dt_bias: Float[Array, "h"] | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    seq_idx: Int[Array, "b t"] | None,
    initial_state: Float[Array, "b h p n"] | Float[Array, "b s h p n"] | None,
    num_documents: int | None,
    chunk_size: int | None,
) -> tuple[Float[Array, "b t h p"], Float[Array, "b h p n"] | Float[Array, "b s h p n"]]:
    """See `ssd`; `chunk_size` means nothing here."""
    (b, t, h, p), (g, n) = x.shape, B.shape[2:]
    arrays = (x, dt, A, D, dt_bias, initial_state)
    wide = jnp.result_type(jnp.float32, *(a.dtype for a in arrays if a is not None))
    ids = jnp.zeros((b, t), jnp.int32) if seq_idx is None else seq_idx
    documents = packing.resolve(ids)
    states = jnp.zeros((b, num_documents or 1, h, p, n), wide)
    if initial_state is not None:
        states = initial_state.astype(wide).reshape(states.shape)
    A = A.astype(wide)

    def token(states, inputs):
        x, step, B, C, slot, starts, is_real = inputs
        B, C = (jnp.repeat(weights, h // g, axis=1) for weights in (B, C))
        state = jnp.take_along_axis(states, slot[:, None, None, None, None], axis=1)[:, 0]
        if not num_documents:
            state = jnp.where(starts[:, None, None, None], 0, state)
        decay = jnp.exp(step * A[None])[..., None, None]
        state = decay * state + (step[..., None] * x)[..., None] * B[:, :, None]
        y = jnp.sum(state * C[:, :, None], axis=-1)
        chosen = is_real[:, None] & (jnp.arange(states.shape[1])[None] == slot[:, None])
        return jnp.where(chosen[..., None, None, None], state[:, None], states), y

    def real(values):
        """Zero at padding, whatever stands there."""
        mask = documents.is_real.reshape(b, t, *(1,) * (values.ndim - 2))
        return jnp.where(mask, values.astype(wide), 0)

    # One state per document: continue that document's. One per row: there is a single slot, and
    # a real token whose document differs from the last real token's starts from zero.
    slot = jnp.maximum(ids, 0) if num_documents else jnp.zeros_like(ids)
    step = step_size(dt, dt_bias, dt_softplus, dt_limit, documents.is_real, wide)
    inputs = (real(x), step, real(B), real(C), slot, documents.starts, documents.is_real)
    states, y = jax.lax.scan(token, states, tuple(jnp.moveaxis(value, 1, 0) for value in inputs))
    y = jnp.moveaxis(y, 0, 1)
    if D is not None:
        y = y + real(x) * (D if D.ndim == 2 else D[:, None]).astype(wide)[None, None]
    y = y if z is None else y * jax.nn.silu(real(z))
    return y.astype(x.dtype), states if num_documents else states[:, 0]
