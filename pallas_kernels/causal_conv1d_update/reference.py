# SPDX-License-Identifier: Apache-2.0
"""The definition of `causal_conv1d_update`: token by token, in float32 (float64 for float64)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import devices


def supports(device: devices.Device, arguments: dict) -> str | None:
    """Runs anywhere."""
    return None


def run(
    state: Float[Array, "slots l e"],
    x: Float[Array, "b k e"],
    weight: Float[Array, "e w"],
    bias: Float[Array, "e"] | None,
    activation: str | None,
    state_indices: Int[Array, "b"] | None,
) -> tuple[Float[Array, "b k e"], Float[Array, "slots l e"]]:
    """See `causal_conv1d_update`."""
    b, w, length = x.shape[0], weight.shape[1], state.shape[1]
    given = [array for array in (state, x, weight, bias) if array is not None]
    wide = jnp.result_type(jnp.float32, *given)
    slots = jnp.arange(b) if state_indices is None else state_indices
    is_real = slots >= 0
    rows = state[jnp.maximum(slots, 0)].astype(wide)

    def token(rows, x):
        window = jnp.concatenate([rows, x[:, None]], axis=1)
        y = jnp.sum(window[:, length + 1 - w :] * weight.astype(wide).T[None], axis=1)
        y = y if bias is None else y + bias.astype(wide)[None]
        y = jax.nn.silu(y) if activation == "silu" else y
        return window[:, 1:], jnp.where(is_real[:, None], y, 0.0)

    rows, y = jax.lax.scan(token, rows, jnp.moveaxis(x.astype(wide), 1, 0))
    # What belongs to no slot is written beyond the last row, where writes are dropped.
    slots = jnp.where(is_real, slots, state.shape[0])
    new_state = state.at[slots].set(rows.astype(state.dtype), mode="drop")
    return jnp.moveaxis(y, 0, 1).astype(x.dtype), new_state
