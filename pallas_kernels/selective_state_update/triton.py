# SPDX-License-Identifier: Apache-2.0
"""`selective_state_update` in Triton, for CUDA and ROCm GPUs; gradients are those of `xla.py`."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import devices, triton_call
from pallas_kernels.selective_state_update import xla

_FLOATS = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")


def supports(device: devices.Device, arguments: dict) -> str | None:
    """Returns None if the kernel can run this call, else why it cannot."""
    if (reason := triton_call.missing(device)) is not None:
        return reason
    for name in _FLOATS:
        value = arguments[name]
        if value is not None and value.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"{name} is {value.dtype}; the kernel takes floats of 16 and 32 bits"
    n = arguments["state"].shape[-1]
    if n > 1024:
        return f"n={n} states; the kernel holds at most 1024"
    return None


def run(**arguments) -> tuple[Float[Array, "b h p"], Float[Array, "slots h p n"]]:
    """See `selective_state_update`."""
    arrays = {name: value for name, value in arguments.items() if hasattr(value, "shape")}
    options = {name: value for name, value in arguments.items() if name not in arrays}
    return _update(tuple(sorted(options.items())), arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _update(options, arrays):
    a, flags = arrays, dict(options)
    x, state = a["x"], a["state"]
    (b, h, p), n, groups = x.shape, state.shape[3], a["B"].shape[1]
    slots = a.get("state_indices")
    indices = jnp.arange(b, dtype=jnp.int32) if slots is None else slots.astype(jnp.int32)

    def f32(name):
        return jnp.zeros((h, 1)) if a.get(name) is None else a[name].astype(jnp.float32)

    D, bias, A = f32("D"), f32("dt_bias"), f32("A")
    low, high = flags["dt_limit"]
    limited = (low, high) != (-math.inf, math.inf)
    padded_n = 1 << (n - 1).bit_length()
    # About 2048 states a program.
    channels = max(1, min(1 << (p - 1).bit_length(), 2048 // padded_n))
    y, new = triton_call.triton_call(
        _kernel(), state, x, a["dt"], A, a["B"], a["C"], D, a.get("z", x), bias, indices,
        out_type=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((b, h, p, n), state.dtype),
        ],
        grid=(-(-p // channels), h, b), num_warps=4,
        H=h, P=p, G=groups, low=max(low, -3e38), high=min(high, 3e38),
        N=n, NP=padded_n, BP=channels, DT_P=a["dt"].shape[2] > 1, A_PN=A.shape[2] > 1 or n == 1,
        D_P=D.shape[1] > 1, BIAS_P=bias.shape[1] > 1, HAS_D="D" in a, HAS_Z="z" in a,
        SOFTPLUS=flags["dt_softplus"], LIMIT=limited,
    )  # fmt: skip
    if slots is None:
        return y, new
    # Tokens of no slot write beyond the last row, where writes are dropped.
    return y, state.at[jnp.where(slots < 0, state.shape[0], slots)].set(new, mode="drop")


def _update_fwd(options, arrays):
    return _update(options, arrays), arrays


def _update_bwd(options, arrays, cotangents):
    """Differentiates the XLA implementation at the same arguments."""
    floats = {name: value for name, value in arrays.items() if name in _FLOATS}
    rest = dict.fromkeys((*_FLOATS, "state_indices")) | arrays | dict(options)

    def plain(floats):
        return xla.run(**(rest | floats))

    (gradients,) = jax.vjp(plain, floats)[1](cotangents)
    return (gradients | {name: None for name in arrays if name not in floats},)


_update.defvjp(_update_fwd, _update_bwd)


def _kernel():
    from pallas_kernels.selective_state_update import triton_kernels

    return triton_kernels.update
