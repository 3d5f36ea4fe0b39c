# SPDX-License-Identifier: Apache-2.0
"""`mamba3_step` for any device: two products over ranks around one pass over the state.

The work is reading and writing `ssm`. The previous and the current token's inputs enter it as one
product of 2 r outer products (for one rank two multiply-adds, which fuse into that pass), so that
nothing else of its size exists.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import devices
from pallas_kernels.mamba3_scan import rotary
from pallas_kernels.mamba3_scan.readout import per_rank, read_out
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
    dt, log_decay, trap, B, C = (v.astype(wide) for v in (dt, log_decay, trap, B, C))
    old = (
        state
        if state_indices is None
        else jax.tree.map(lambda array: array[jnp.maximum(state_indices, 0)], state)
    )
    old = jax.tree.map(lambda array: array.astype(wide), old)
    angle = rotary.wrap(old.angle + rotary.increments(angles, dt))
    B, C = (
        rotary.rotate(_biased(weights, bias), angle[:, None], mimo_x is not None)
        for weights, bias in ((B, B_bias), (C, C_bias))
    )
    decay, now = jnp.exp(log_decay), jax.nn.sigmoid(trap)
    inputs = [
        (per_rank(old.x, mimo_x) * (decay * (1 - now) * dt)[:, None, :, None], old.B),
        (per_rank(x.astype(wide), mimo_x) * (now * dt)[:, None, :, None], B),
    ]
    ssm = decay[..., None, None] * old.ssm + _outer_products(*zip(*inputs, strict=True))
    if mimo_x is None:
        y = jnp.sum(ssm * C[:, 0, :, None], axis=-1)[:, None]
    else:
        y = jnp.einsum("bhpn,brhn->brhp", ssm, C, precision=jax.lax.Precision.HIGHEST)
    y = read_out(y, x.astype(wide), D, z, mimo_x, mimo_z, mimo_o, norm_weight, norm_eps)
    new = Mamba3State(angle, ssm, B, x)
    if state_indices is None:
        return y.astype(x.dtype), jax.tree.map(lambda v, like: v.astype(like.dtype), new, state)
    is_real = state_indices >= 0
    # Tokens of no slot write beyond the last row, where writes are dropped.
    rows = jnp.where(is_real, state_indices, state.x.shape[0])
    state = jax.tree.map(
        lambda into, value: into.at[rows].set(value.astype(into.dtype), mode="drop"), state, new
    )
    y = jnp.where(is_real.reshape(-1, *(1,) * (y.ndim - 1)), y, 0)
    return y.astype(x.dtype), state


def _outer_products(
    x: tuple[Float[Array, "b r h p"], ...], B: tuple[Float[Array, "b r h n"], ...]
) -> Float[Array, "b h p n"]:
    """Sum of outer products over ranks and over the pairs in the tuples."""
    if x[0].shape[1] == 1:
        return sum(u[:, 0, :, :, None] * v[:, 0, :, None] for u, v in zip(x, B, strict=True))
    x, B = jnp.concatenate(x, axis=1), jnp.concatenate(B, axis=1)
    return jnp.einsum("brhp,brhn->bhpn", x, B, precision=jax.lax.Precision.HIGHEST)


def _biased(values: Float[Array, "b r g n"], bias: Float[Array, "h r n"]) -> Array:
    """B or C for every head (b, r, h, n), with its bias."""
    heads = jnp.repeat(values, bias.shape[0] // values.shape[2], axis=2)
    return heads + jnp.swapaxes(bias.astype(values.dtype), 0, 1)[None]
