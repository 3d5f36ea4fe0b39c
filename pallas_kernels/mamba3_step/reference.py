# SPDX-License-Identifier: Apache-2.0
"""The definition of `mamba3_step`: one token of `mamba3_scan`, in float32 (float64 for float64)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import devices
from pallas_kernels.mamba3_scan.readout import read_out
from pallas_kernels.mamba3_scan.reference import advance
from pallas_kernels.mamba3_scan.state import Mamba3State


def supports(device: devices.Device, arguments: dict) -> str | None:
    """Runs anywhere."""
    return None


def run(
    state: Mamba3State,
    x: Float[Array, "b h p"],
    dt: Float[Array, "b h"],
    log_decay: Float[Array, "b h"],
    B: Float[Array, "b r g n"],
    C: Float[Array, "b r g n"],
    trap: Float[Array, "b h"],
    angles: Float[Array, "b 1 a"] | Float[Array, "b h a"],
    B_bias: Float[Array, "h r n"],
    C_bias: Float[Array, "h r n"],
    D: Float[Array, "h"] | None,
    z: Float[Array, "b h p"] | None,
    mimo_x: Float[Array, "h r p"] | None,
    mimo_z: Float[Array, "h r p"] | None,
    mimo_o: Float[Array, "h r p"] | None,
    norm_weight: Float[Array, "h p"] | None,
    norm_eps: float,
    state_indices: Int[Array, "b"] | None,
) -> tuple[Float[Array, "b h p"] | Float[Array, "b r h p"], Mamba3State]:
    """See `mamba3_step`."""
    token = (x, dt, log_decay, B, C, trap, angles)
    parameters = (B_bias, C_bias, D, mimo_x, mimo_z, mimo_o, norm_weight)
    wide = jnp.result_type(
        jnp.float32, *(v.dtype for v in jax.tree.leaves((token, parameters, state)))
    )
    b, slots = x.shape[0], state.x.shape[0]
    indices = jnp.arange(b) if state_indices is None else state_indices
    is_real = indices >= 0
    old = jax.tree.map(lambda array: array[jnp.maximum(indices, 0)].astype(wide), state)
    token = tuple(value.astype(wide) for value in token)
    y, new = advance(old, *token, B_bias, C_bias, mimo_x)
    y = read_out(y, x.astype(wide), D, z, mimo_x, mimo_z, mimo_o, norm_weight, norm_eps)
    y = jnp.where(is_real.reshape((b,) + (1,) * (y.ndim - 1)), y, 0)
    # Tokens of no slot write beyond the last row, where writes are dropped.
    rows = jnp.where(is_real, indices, slots)
    state = jax.tree.map(
        lambda into, value: into.at[rows].set(value.astype(into.dtype), mode="drop"), state, new
    )
    return y.astype(x.dtype), state
