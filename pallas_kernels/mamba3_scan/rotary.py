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


def pairs_first(
    values: Float[Array, "*shape n"], a: int, half_split: bool
) -> Float[Array, "*shape n"]:
    """Reorders channels to: first of each pair, second of each pair, all others.

    Products of B and C do not notice one order for both, and turning needs no interleaving in it.
    """
    n = values.shape[-1]
    if half_split:
        cuts = (slice(a), slice(n // 2, n // 2 + a), slice(a, n // 2), slice(n // 2 + a, n))
        return jnp.concatenate([values[..., cut] for cut in cuts], axis=-1)
    pairs = values[..., : 2 * a].reshape(*values.shape[:-1], a, 2)
    pairs = jnp.swapaxes(pairs, -1, -2).reshape(*values.shape[:-1], 2 * a)
    return jnp.concatenate((pairs, values[..., 2 * a :]), axis=-1)


def pairs_back(
    values: Float[Array, "*shape n"], a: int, half_split: bool
) -> Float[Array, "*shape n"]:
    """Undoes `pairs_first`."""
    n = values.shape[-1]
    if half_split:
        middle = a + n // 2
        cuts = (slice(a), slice(2 * a, middle), slice(a, 2 * a), slice(middle, n))
        return jnp.concatenate([values[..., cut] for cut in cuts], axis=-1)
    pairs = values[..., : 2 * a].reshape(*values.shape[:-1], 2, a)
    pairs = jnp.swapaxes(pairs, -1, -2).reshape(*values.shape[:-1], 2 * a)
    return jnp.concatenate((pairs, values[..., 2 * a :]), axis=-1)


def partner(values: Float[Array, "*shape n"], a: int) -> Float[Array, "*shape n"]:
    """What sin multiplies in a turn, in the order of `pairs_first`: (-second, first, zeros)."""
    first, second, others = values[..., :a], values[..., a : 2 * a], values[..., 2 * a :]
    return jnp.concatenate((-second, first, jnp.zeros_like(others)), axis=-1)


def turn(
    values: Float[Array, "*shape n"],
    partners: Float[Array, "*shape n"],
    cos: Float[Array, "*shape a"],
    sin: Float[Array, "*shape a"],
) -> Float[Array, "*shape n"]:
    """`rotate` in the order of `pairs_first`, given the `partner`s: two multiplications.

    Where a divides n, every run of a channels is one row of a table whose rows beyond the pairs are
    turned by nothing; that vectorises, joining pieces does not.
    """
    n, a = values.shape[-1], cos.shape[-1]
    if n % a:
        cos, sin = cos[..., None, :], sin[..., None, :]
        pairs, other = (v[..., : 2 * a].reshape(*v.shape[:-1], 2, a) for v in (values, partners))
        turned = pairs * cos + other * sin
        turned = turned.reshape(*turned.shape[:-2], 2 * a)
        others = jnp.broadcast_to(values[..., 2 * a :], (*turned.shape[:-1], n - 2 * a))
        return jnp.concatenate((turned, others), axis=-1)
    values, partners = (v.reshape(*v.shape[:-1], n // a, a) for v in (values, partners))
    turns = (jnp.arange(n // a) < 2).reshape((1,) * (cos.ndim - 1) + (n // a, 1))
    cos = jnp.where(turns, cos[..., None, :], 1)
    sin = jnp.where(turns, sin[..., None, :], 0)
    turned = values * cos + partners * sin
    return turned.reshape(*turned.shape[:-2], n)
