# SPDX-License-Identifier: Apache-2.0
"""What stands between the state's answer to C and the op's output: skip, norm, gate, rank sum."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def per_rank(
    x: Float[Array, "*bt h p"], mimo_x: Float[Array, "h r p"] | None
) -> Float[Array, "*bt r h p"]:
    """The input each rank sees, x times its mimo_x; x itself, as rank 1, without mimo_x."""
    if mimo_x is None:
        return x[..., None, :, :]
    return x[..., None, :, :] * _like(mimo_x, x)


def read_out(
    y: Float[Array, "*bt r h p"],
    x: Float[Array, "*bt h p"],
    D: Float[Array, "h"] | None,
    z: Float[Array, "*bt h p"] | None,
    mimo_x: Float[Array, "h r p"] | None,
    mimo_z: Float[Array, "h r p"] | None,
    mimo_o: Float[Array, "h r p"] | None,
    norm_weight: Float[Array, "h p"] | None,
    norm_eps: float,
) -> Float[Array, "*bt h p"] | Float[Array, "*bt r h p"]:
    """Adds the skip, normalises over p, gates, weighs the ranks and sums them; each if given.

    Everything happens in the dtype of `y`. Without `mimo_x` the only rank's axis is dropped, with
    it but without `mimo_o` the ranks stay.
    """
    wide = y.dtype
    x, z = x.astype(wide), None if z is None else z.astype(wide)
    if D is not None:
        D = D.astype(wide).reshape((1,) * (y.ndim - 2) + (-1, 1))
        y = y + D * per_rank(x, mimo_x)
    if norm_weight is not None:
        square = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
        weight = norm_weight.astype(wide).reshape((1,) * (y.ndim - 2) + norm_weight.shape)
        y = y * jax.lax.rsqrt(square + norm_eps) * weight
    if z is not None:
        y = y * jax.nn.silu(per_rank(z, mimo_z))
    if mimo_o is not None:
        return jnp.sum(y * _like(mimo_o, x), axis=-3)
    return y if mimo_x is not None else jnp.squeeze(y, axis=-3)


def _like(weight: Float[Array, "h r p"], x: Float[Array, "*bt h p"]) -> Float[Array, "... r h p"]:
    """A per-rank weight with x's dtype and leading axes of 1, the rank before the head."""
    weight = jnp.swapaxes(weight.astype(x.dtype), 0, 1)
    return weight.reshape((1,) * (x.ndim - 2) + weight.shape)
