# SPDX-License-Identifier: Apache-2.0
"""Mamba-3's data-dependent rotation: how angles accumulate and which channels they turn."""

import math

import jax
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


def exact_parts(steps: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Splits steps in two: multiples of 2**-12, which add without rounding below 2**12, and rests.

    A long sequence adds up thousands of chunks, and equal steps round the same way in every one.
    """
    coarse = jnp.round(steps * 4096) / 4096
    return coarse, steps - coarse


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


@jax.custom_vjp
def turn(
    values: Float[Array, "*shape n"], angle: Float[Array, "*shape a"]
) -> Float[Array, "*shape n"]:
    """`rotate` for channels in the order of `pairs_first`; the angle may have axes of size 1.

    Its gradient turns the cotangent back, and takes that of the angle from turned values, so that
    the sine and cosine are the only tables and nothing of the size of `values` is kept twice.
    """
    return _turn(values, *_tables(angle))


def _turn_forward(values, angle):
    cos, sin = _tables(angle)
    turned = _turn(values, cos, sin)
    return turned, (turned, cos, sin)


def _turn_backward(saved, cotangent):
    turned, cos, sin = saved
    a = cos.shape[-1]
    first, second = turned[..., :a], turned[..., a : 2 * a]
    of_angle = first * cotangent[..., a : 2 * a] - second * cotangent[..., :a]
    # The angle is shared along axes where it has size 1.
    shared = [i for i, size in enumerate(cos.shape) if size != of_angle.shape[i]]
    of_angle = jnp.sum(of_angle, axis=shared, keepdims=True) if shared else of_angle
    return _turn(cotangent, cos, -sin), of_angle


turn.defvjp(_turn_forward, _turn_backward)


def _tables(angle: Float[Array, "*shape a"]) -> tuple[Array, Array]:
    # The barrier keeps the compiler from evaluating them anew for every channel.
    return jax.lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))


def _turn(values: Array, cos: Array, sin: Array) -> Array:
    a = cos.shape[-1]
    first, second, others = values[..., :a], values[..., a : 2 * a], values[..., 2 * a :]
    first, second = first * cos - second * sin, first * sin + second * cos
    return jnp.concatenate((first, second, others), axis=-1)
