# SPDX-License-Identifier: Apache-2.0
"""`causal_conv1d_update` for any device: one window of rows, the sequence's convolution over it."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import devices
from pallas_kernels.causal_conv1d import xla as sequence


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
    (_, k, _), w = x.shape, weight.shape[1]
    slots, length, _ = state.shape
    rows = state
    if state_indices is not None:
        rows = jnp.take(state, jnp.maximum(state_indices, 0), axis=0, mode="clip")
    latest = rows[:, length - (w - 1) :] if w > 1 else None
    y, _ = sequence.run(x, weight, bias, activation, None, latest, None)
    kept = x[:, max(k - length, 0) :].astype(state.dtype)
    new_rows = jnp.concatenate([rows[:, kept.shape[1] :], kept], axis=1)
    if state_indices is None:
        return y, new_rows
    is_real = state_indices >= 0
    y = jnp.where(is_real[:, None, None], y, 0)
    # What belongs to no slot is written beyond the last row, where writes are dropped.
    target = jnp.where(is_real, state_indices, slots)
    return y, state.at[target].set(new_rows, mode="drop")
