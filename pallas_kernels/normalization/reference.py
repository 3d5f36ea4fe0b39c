# SPDX-License-Identifier: Apache-2.0
"""The definition of the norms, in float32 (float64 for float64)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import devices


def supports(device: devices.Device, arguments: dict) -> str | None:
    """Runs anywhere."""
    return None


def run(
    x: Float[Array, "*batch f"],
    residual: Float[Array, "*batch f"] | None,
    z: Float[Array, "*batch f"] | None,
    weight: Float[Array, "f"],
    bias: Float[Array, "f"] | None,
    eps: float,
    group_size: int,
    centered: bool,
    norm_before_gate: bool,
    total_dtype: jnp.dtype | None,
) -> tuple[Float[Array, "*batch f"], Float[Array, "*batch f"] | None]:
    """Returns y, and x + residual in `total_dtype` (None without one); see `add_rms_norm`."""
    given = [array for array in (x, residual, z, weight, bias) if array is not None]
    wide = jnp.result_type(jnp.float32, *given)
    features = (1,) * (x.ndim - 1) + (-1,)
    total = x.astype(wide) if residual is None else x.astype(wide) + residual.astype(wide)
    gate = 1 if z is None else jax.nn.silu(z.astype(wide))
    u = total if norm_before_gate else total * gate
    groups = u.reshape(*u.shape[:-1], -1, group_size)
    if centered:
        groups = groups - jnp.mean(groups, axis=-1, keepdims=True)
    mean_square = jnp.mean(groups * groups, axis=-1, keepdims=True)
    y = (groups / jnp.sqrt(mean_square + eps)).reshape(u.shape)
    y = y * weight.astype(wide).reshape(features)
    y = y if bias is None else y + bias.astype(wide).reshape(features)
    y = y * gate if norm_before_gate else y
    return y.astype(x.dtype), None if total_dtype is None else total.astype(total_dtype)
