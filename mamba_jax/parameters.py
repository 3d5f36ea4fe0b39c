# SPDX-License-Identifier: Apache-2.0
"""How a parameter is made: its value, the logical names of its axes, and whether it decays.

Logical names (translated to mesh axes by `partitioning/rules.py`): embed, inner, heads, headdim,
groups, state, conv, mlp, vocab; "groups:2" is an axis of 2 groups that must not be cut
inside one. The initial distributions are those of mamba_ssm.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

Initializer = Callable[[Array, Sequence[int], jnp.dtype], Array]


def parameter(value: Array, axes: Sequence[str | None], *, weight_decay: bool) -> nnx.Param:
    """Wraps `value` as an NNX parameter.

    Args:
      value: The initial value.
      axes: A logical name, or None, per axis of `value`.
      weight_decay: Whether an optimizer should decay it; optimizers read this metadata.
    """
    # Under a name of our own: Flax looks the names in its `out_sharding` up in whatever mesh is
    # ambient while a module is being built, and fails; placement is `partitioning/rules.py`'s.
    return nnx.Param(value, logical_axes=tuple(axes), weight_decay=weight_decay)


def uniform(bound: float) -> Initializer:
    """Draws from U(-bound, bound)."""

    def draw(key, shape, dtype):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return draw


def fan_in_uniform(fan_in: int) -> Initializer:
    """Draws from U(±1/sqrt(fan_in)), torch's default for linear and convolution layers."""
    return uniform(1 / math.sqrt(fan_in))


def constant(value: float) -> Initializer:
    """Fills with `value`."""
    return lambda key, shape, dtype: jnp.full(shape, value, dtype)


def dt_bias(dt_min: float, dt_max: float, floor: float) -> Initializer:
    """Draws the bias whose softplus is log-uniform in [dt_min, dt_max] and at least `floor`."""

    def draw(key, shape, dtype):
        log_dt = jax.random.uniform(key, shape, jnp.float32, math.log(dt_min), math.log(dt_max))
        dt = jnp.maximum(jnp.exp(log_dt), floor)
        # The inverse of softplus, written so that small dt loses no digits.
        return (dt + jnp.log(-jnp.expm1(-dt))).astype(dtype)

    return draw


def log_arange() -> Initializer:
    """Fills every row with log(1 ... n): the S4D-real start of A_log."""

    def fill(key, shape, dtype):
        return jnp.broadcast_to(jnp.log(jnp.arange(1, shape[-1] + 1, dtype=dtype)), shape)

    return fill


def log_uniform(low: float, high: float) -> Initializer:
    """Draws the logarithm of a value uniform in [low, high]."""

    def draw(key, shape, dtype):
        return jnp.log(jax.random.uniform(key, shape, jnp.float32, low, high)).astype(dtype)

    return draw
