# SPDX-License-Identifier: Apache-2.0
"""Mamba-3's data-dependent rotation: how angles accumulate and which channels they turn."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

# 2 pi in two float32 parts: with the first alone every turn would add 1.7e-7 rad of error.
_TURN_HIGH = 6.28125
_TURN_LOW = 2 * math.pi - _TURN_HIGH


def increments(
    angles: Float[Array, "*bt 1 a"] | Float[Array, "*bt h a"], dt: Float[Array, "*bt h"]
) -> Float[Array, "*bt h a"]:
    """Angle every token adds: pi * tanh(angles) * dt, in radians and the dtype of dt."""
    return math.pi * jnp.tanh(angles.astype(dt.dtype)) * dt[..., None]


def wrap(angle: Float[Array, "..."]) -> Float[Array, "..."]:
    """Takes whole turns off, to [-pi, pi]; the gradient is that of the identity.

    Sums of many increments keep their absolute error only if they stay small.
    """
    turns = jnp.round(angle * (0.5 / math.pi))
    return angle - turns * _TURN_HIGH - turns * _TURN_LOW


def rotate(
    vector: Float[Array, "*shape n"], angle: Float[Array, "*shape a"], half_split: bool
) -> Float[Array, "*shape n"]:
    """Turns the pair of channels i by angle i; channels beyond the pairs pass through.

    Args:
      vector: (..., n), float.
      angle: (..., a), float; 2 a <= n. Leading axes broadcast against those of `vector`.
      half_split: Whether pair i is (i, i + n/2), as with ranks, or (2 i, 2 i + 1), as without.

    Returns:
      (..., n), the turned vector.
    """
    n, a = vector.shape[-1], angle.shape[-1]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if half_split:
        first, passed = vector[..., :a], vector[..., a : n // 2]
        second, passed_too = vector[..., n // 2 : n // 2 + a], vector[..., n // 2 + a :]
        turned = (first * cos - second * sin, passed, first * sin + second * cos, passed_too)
        return jnp.concatenate(turned, axis=-1)
    pairs = vector[..., : 2 * a].reshape(*vector.shape[:-1], a, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack((first * cos - second * sin, first * sin + second * cos), axis=-1)
    turned = turned.reshape(*turned.shape[:-2], 2 * a)
    return jnp.concatenate((turned, vector[..., 2 * a :]), axis=-1)
