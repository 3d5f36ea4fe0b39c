# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding of attention layers (Su et al. 2021, arXiv:2104.09864)."""

import jax.numpy as jnp

from mamba_jax.array_types import Array, Float, Int


def apply_rotary(
    x: Float[Array, "b t h p"],
    position: Int[Array, "b t"],
    rotary_dim: int,
    *,
    base: float,
    interleaved: bool,
) -> Float[Array, "b t h p"]:
    """Rotates the first `rotary_dim` channels of every head by angles that grow with position.

    Channel pair i turns by position · base^(-2i / rotary_dim). Pairs are (i, i + rotary_dim/2), or
    (2i, 2i + 1) when `interleaved`. Computed in fp32; the result has the dtype of x.
    """
    half = rotary_dim // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = position[..., None, None].astype(jnp.float32) * frequency[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    rotated = x[..., :rotary_dim].astype(jnp.float32)
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :half], rotated[..., half:]
    turned = (first * cos - second * sin, first * sin + second * cos)
    if interleaved:
        rotated = jnp.stack(turned, axis=-1).reshape(rotated.shape)
    else:
        rotated = jnp.concatenate(turned, axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., rotary_dim:]], axis=-1)
