# SPDX-License-Identifier: Apache-2.0
"""The norms for any device, with a backward pass that computes statistics and gate again.

Kept for it are the arguments, or, where the returned residual holds the sum unrounded, that one
array, which the next layer keeps alive anyway. README.md has the derivation.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import devices


class _Options(NamedTuple):
    """What does not vary with the data."""

    eps: float
    group_size: int
    centered: bool
    norm_before_gate: bool
    total_dtype: jnp.dtype | None
    x_dtype: jnp.dtype
    residual_dtype: jnp.dtype | None
    wide: jnp.dtype
    platform: str


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
    options = _Options(
        float(eps),
        group_size,
        centered,
        norm_before_gate,
        total_dtype,
        x.dtype,
        None if residual is None else residual.dtype,
        jnp.result_type(jnp.float32, *given),
        devices.target_device().platform,
    )
    return _norm(options, x, residual, z, weight, bias)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(options: _Options, x, residual, z, weight, bias):
    total = _sum(options, x, residual)
    gate = None if z is None else jax.nn.silu(z.astype(options.wide))
    gates_input = gate is not None and not options.norm_before_gate
    normed, _ = _normalize(options, total * gate if gates_input else total)
    y = normed * _row(weight, normed)
    y = y if bias is None else y + _row(bias, y)
    y = y if gate is None or gates_input else y * gate
    rounded = None if options.total_dtype is None else total.astype(options.total_dtype)
    return y.astype(options.x_dtype), rounded


def _forward(options: _Options, x, residual, z, weight, bias):
    y, total = _norm(options, x, residual, z, weight, bias)
    if total is not None and total.dtype == options.wide:
        return (y, total), (total, None, z, weight, bias)
    return (y, total), (x, residual, z, weight, bias)


def _backward(options: _Options, saved, cotangents):
    x, residual, z, weight, bias = saved
    dy, dtotal = (None if c is None else c.astype(options.wide) for c in cotangents)
    total = _sum(options, x, residual)
    gate, dgate = (None, None) if z is None else _silu(z.astype(options.wide))
    gates_input = gate is not None and not options.norm_before_gate
    normed, scale = _normalize(options, total * gate if gates_input else total)
    dz = None
    if gate is not None and not gates_input:
        scaled = normed * _row(weight, normed)
        scaled = scaled if bias is None else scaled + _row(bias, scaled)
        dz = dy * scaled * dgate
        dy = dy * gate
    dweight, dbias = _sums(options, dy, normed)
    dnormed = dy * _row(weight, dy)
    dinput = _normalize_transposed(options, dnormed, normed, scale)
    if gates_input:
        dz = dinput * total * dgate
        dinput = dinput * gate
    dinput = dinput if dtotal is None else dinput + dtotal
    return (
        dinput.astype(options.x_dtype),
        None if options.residual_dtype is None else dinput.astype(options.residual_dtype),
        None if z is None else dz.astype(z.dtype),
        dweight.astype(weight.dtype),
        None if bias is None else dbias.astype(bias.dtype),
    )


def _normalize(options: _Options, u: Float[Array, "*batch f"]):
    """Returns the normed features, and 1 / sqrt(variance or mean square + eps) of each group."""
    groups = _grouped(options, u)
    if options.centered:
        groups = groups - jnp.mean(groups, axis=-1, keepdims=True)
    mean_square = jnp.mean(groups * groups, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(mean_square + jnp.asarray(options.eps, options.wide))
    return (groups * scale).reshape(u.shape), scale


def _normalize_transposed(options: _Options, dnormed, normed, scale):
    """Returns the gradient of what was normalised from that of the normed features."""
    dgroups, groups = _grouped(options, dnormed), _grouped(options, normed)
    along = jnp.mean(dgroups * groups, axis=-1, keepdims=True)
    dinput = dgroups - groups * along
    if options.centered:
        dinput = dinput - jnp.mean(dgroups, axis=-1, keepdims=True)
    return (dinput * scale).reshape(dnormed.shape)


def _sums(options: _Options, dy, normed):
    """Returns the sums of dy * normed and of dy over all axes but the features."""
    axis = dy.ndim - 2
    if options.platform != "cpu" or axis < 0:
        return tuple(jnp.sum(v, axis=tuple(range(dy.ndim - 1))) for v in (dy * normed, dy))

    # A loop is many times faster than what XLA makes of these sums on a CPU.
    def add(sums, i):
        dy_i, normed_i = (jax.lax.dynamic_index_in_dim(v, i, axis, False) for v in (dy, normed))
        return (sums[0] + dy_i * normed_i, sums[1] + dy_i), None

    zeros = jnp.zeros((*dy.shape[:axis], dy.shape[-1]), dy.dtype)
    sums, _ = jax.lax.scan(add, (zeros, zeros), jnp.arange(dy.shape[axis]))
    return tuple(jnp.sum(v, axis=tuple(range(axis))) for v in sums)


def _sum(options: _Options, x, residual):
    x = x.astype(options.wide)
    return x if residual is None else x + residual.astype(options.wide)


def _silu(z):
    """Returns silu(z) and its derivative."""
    sigmoid = jax.nn.sigmoid(z)
    return z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))


def _grouped(options: _Options, u: Float[Array, "*batch f"]) -> Float[Array, "*batch c i"]:
    return u.reshape(*u.shape[:-1], -1, options.group_size)


def _row(features: Float[Array, "f"], like: Array) -> Array:
    """A vector over the features, ready to meet `like` without promotion of rank or dtype."""
    return features.astype(like.dtype).reshape((1,) * (like.ndim - 1) + (-1,))


_norm.defvjp(_forward, _backward)
