# SPDX-License-Identifier: Apache-2.0
"""`selective_state_update` in plain JAX for any device, reading and writing the state once.

Unlike `reference.py` it never widens or repeats what heads share: B and C stay per group, a decay
shared by a head's channels stays one number, and without `state_indices` nothing is gathered.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from pallas_kernels import devices


def supports(device: devices.Device, arguments: dict) -> str | None:
    """Runs anywhere."""
    return None


def run(
    state: Inexact[Array, "slots h p n"],
    x: Float[Array, "b h p"],
    dt: Float[Array, "b h 1"] | Float[Array, "b h p"],
    A: Inexact[Array, "h 1 1"] | Inexact[Array, "h p n"],
    B: Inexact[Array, "b g n"],
    C: Inexact[Array, "b g n"],
    D: Float[Array, "h 1"] | Float[Array, "h p"] | None,
    z: Float[Array, "b h p"] | None,
    dt_bias: Float[Array, "h 1"] | Float[Array, "h p"] | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    state_indices: Int[Array, "b"] | None,
) -> tuple[Float[Array, "b h p"], Inexact[Array, "slots h p n"]]:
    """See `selective_state_update`."""
    arrays = (state, x, dt, A, B, C, D, z, dt_bias)
    real = jnp.result_type(
        jnp.float32, *(jnp.finfo(v.dtype).dtype for v in arrays if v is not None)
    )
    wide_x = x.astype(real)
    step = dt.astype(real) + (0 if dt_bias is None else dt_bias.astype(real)[None])
    step = jax.nn.softplus(step) if dt_softplus else step
    step = step if dt_limit == (-math.inf, math.inf) else jnp.clip(step, *dt_limit)

    is_real = None if state_indices is None else state_indices >= 0
    rows = state if is_real is None else state[jnp.where(is_real, state_indices, 0)]
    y, new = _advance(rows, wide_x, step, A, B, C, real)
    y = y if D is None else y + D.astype(real)[None] * wide_x
    y = y if z is None else y * jax.nn.silu(z.astype(real))
    new = new.astype(state.dtype)
    if is_real is None:
        return y.astype(x.dtype), new
    y = jnp.where(is_real[:, None, None], y, 0)
    # Tokens of no slot write beyond the last row, where writes are dropped.
    slots = jnp.where(is_real, state_indices, state.shape[0])
    return y.astype(x.dtype), state.at[slots].set(new, mode="drop")


# The new state and its decay are cheap to compute again and large to keep for a backward pass.
@functools.partial(jax.checkpoint, static_argnums=(6,))
def _advance(
    state: Inexact[Array, "b h p n"],
    x: Float[Array, "b h p"],
    step: Float[Array, "b h #p"],
    A: Inexact[Array, "h #p #n"],
    B: Inexact[Array, "b g n"],
    C: Inexact[Array, "b g n"],
    real: jnp.dtype,
) -> tuple[Float[Array, "b h p"], Inexact[Array, "b h p n"]]:
    """Returns sum(new * C) and the new state, both wide."""
    b, g = B.shape[:2]
    _, h, p, n = state.shape
    wide = jnp.result_type(real, A.dtype)
    B, C = (weights.astype(wide)[:, :, None, None] for weights in (B, C))
    decay = jnp.exp(step[..., None] * A.astype(wide)[None])
    decay = decay.reshape(b, g, h // g, *decay.shape[2:])
    drive = (step * x).reshape(b, g, h // g, p, 1) * B
    new = decay * state.astype(wide).reshape(b, g, h // g, p, n) + drive
    y = jnp.sum(new * C, axis=-1)
    y = 2 * y.real if jnp.iscomplexobj(y) else y
    return y.reshape(b, h, p), new.reshape(b, h, p, n)
