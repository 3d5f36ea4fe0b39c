# SPDX-License-Identifier: Apache-2.0
"""The definition of `selective_state_update`, in float32 (float64 for float64).

Arguments are the canonical ones of `api.py`: always per head, size-1 axes where the channels of a
head share a value.
"""

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
    real = jnp.result_type(jnp.float32, *_real_dtypes(state, x, dt, A, B, C, D, z, dt_bias))
    wide = jnp.result_type(real, A.dtype)
    step = dt.astype(real) + (0 if dt_bias is None else dt_bias.astype(real)[None])
    step = jax.nn.softplus(step) if dt_softplus else step
    step = step if dt_limit == (-math.inf, math.inf) else jnp.clip(step, *dt_limit)

    slots = jnp.arange(x.shape[0]) if state_indices is None else jnp.maximum(state_indices, 0)
    is_real = jnp.full(x.shape[0], True) if state_indices is None else state_indices >= 0
    old = state[slots].astype(wide)
    heads_per_group = x.shape[1] // B.shape[1]
    B, C = (jnp.repeat(weights.astype(wide), heads_per_group, axis=1) for weights in (B, C))
    decay = jnp.exp(step[..., None] * A.astype(wide)[None])
    new = decay * old + (step * x.astype(real))[..., None] * B[:, :, None]
    y = jnp.sum(new * C[:, :, None], axis=-1)
    y = 2 * y.real if jnp.iscomplexobj(y) else y

    y = y if D is None else y + D.astype(real)[None] * x.astype(real)
    y = y if z is None else y * jax.nn.silu(z.astype(real))
    y = jnp.where(is_real[:, None, None], y, 0)
    # Tokens of no slot write beyond the last row, where writes are dropped.
    slots = jnp.where(is_real, slots, state.shape[0])
    return y.astype(x.dtype), state.at[slots].set(new.astype(state.dtype), mode="drop")


def _real_dtypes(*arrays: Array | None) -> list[jnp.dtype]:
    return [jnp.finfo(array.dtype).dtype for array in arrays if array is not None]
