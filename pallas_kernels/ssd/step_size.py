# SPDX-License-Identifier: Apache-2.0
"""From raw `dt` to the step of the recurrence: bias, softplus, limits, in that order."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def step_size(
    dt: Float[Array, "b t h"],
    dt_bias: Float[Array, "h"] | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    is_real: Bool[Array, "b t"] | None,
    dtype: jnp.dtype,
) -> Float[Array, "b t h"]:
    """Returns the step of every token in `dtype` (float32 or wider), 0 for padding.

    A step of 0 leaves the state as it is, so that padding needs no other care in a recurrence. The
    gradient stops where a limit bites; at the limit itself it passes.
    """
    # Before as well as after: what stands at padding may be NaN, and so would its gradient be.
    dt = dt if is_real is None else jnp.where(is_real[..., None], dt, 0)
    step = dt.astype(dtype)
    step = step if dt_bias is None else step + dt_bias.astype(dtype)[None, None]
    step = jax.nn.softplus(step) if dt_softplus else step
    lowest, highest = dt_limit
    # Not jnp.clip: its gradient at a limit is one half.
    step = jnp.where(step < lowest, lowest, jnp.where(step > highest, highest, step))
    return step if is_real is None else jnp.where(is_real[..., None], step, 0)
