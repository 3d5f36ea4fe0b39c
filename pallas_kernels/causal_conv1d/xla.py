# SPDX-License-Identifier: Apache-2.0
"""`causal_conv1d` for any device: w shifted reads and a sum, fused by XLA into one pass.

Owns the arithmetic and its backward pass, which keeps nothing but the inputs: the value before the
activation is computed again. Where documents are packed, `taps.py` says which row of [initial
states, x] each tap of each token reads; without `seq_idx` these are plain slices.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import devices
from pallas_kernels.causal_conv1d import taps as tap_rows


def supports(device: devices.Device, arguments: dict) -> str | None:
    """Runs anywhere."""
    return None


def run(
    x: Float[Array, "b t e"],
    weight: Float[Array, "e w"],
    bias: Float[Array, "e"] | None,
    activation: str | None,
    seq_idx: Int[Array, "b t"] | None,
    initial_state: Float[Array, "b w-1 e"] | Float[Array, "b s w-1 e"] | None,
    num_documents: int | None,
) -> tuple[Float[Array, "b t e"], Float[Array, "b w-1 e"] | Float[Array, "b s w-1 e"]]:
    """See `causal_conv1d`."""
    (b, t, e), w = x.shape, weight.shape[1]
    states = None if initial_state is None else initial_state.reshape(b, -1, e)
    platform = devices.target_device().platform
    if seq_idx is None:
        y = _convolve(activation, platform, x, weight, bias, states, None)
        before = jnp.zeros((b, w - 1, e), x.dtype) if states is None else states
        kept = x[:, max(t - (w - 1), 0) :]
        return y, jnp.concatenate([before[:, kept.shape[1] :], kept], axis=1)
    reads = tap_rows.resolve(seq_idx, w, states is not None, num_documents)
    y = _convolve(activation, platform, x, weight, bias, states, reads.taps)
    final = _rows(_extended(x, states), reads.final)
    return y, final.reshape(b, num_documents, w - 1, e) if num_documents else final


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _convolve(
    activation: str | None,
    platform: str,
    x: Float[Array, "b t e"],
    weight: Float[Array, "e w"],
    bias: Float[Array, "e"] | None,
    states: Float[Array, "b r e"] | None,
    taps: Int[Array, "b t w"] | None,
) -> Float[Array, "b t e"]:
    """Convolves; `taps` are rows of [states, x], -1 for zero; None for the w rows up to each."""
    pre = _before_activation(x, weight, bias, states, taps)
    y = jax.nn.silu(pre) if activation == "silu" else pre
    # Padding reads nothing, not even the current token (the last tap).
    y = y if taps is None else jnp.where(taps[..., -1:] >= 0, y, 0)
    return y.astype(x.dtype)


def _forward(activation, platform, x, weight, bias, states, taps):
    y = _convolve(activation, platform, x, weight, bias, states, taps)
    return y, (x, weight, bias, states, taps)


def _backward(activation, platform, saved, dy):
    x, weight, bias, states, taps = saved
    wide = _wide(x, weight, bias, states)
    dpre = dy.astype(wide)
    if activation == "silu":
        pre = _before_activation(x, weight, bias, states, taps)
        sigmoid = jax.nn.sigmoid(pre)
        dpre = dpre * sigmoid * (1 + pre * (1 - sigmoid))
    if taps is not None:
        dpre = jnp.where(taps[..., -1:] >= 0, dpre, 0)
    dx, dstates = _input_gradients(dpre, weight.astype(wide), states, taps)
    w = weight.shape[1]
    # Without taps row j of token t is t + j, counted from w-1 rows before x.
    no_states = taps is None and states is None
    extended = _shifted_in(x, w - 1) if no_states else _extended(x, states)
    sums = _tap_sums_scanned if platform == "cpu" else _tap_sums_reduced
    dweight, dbias = sums(dpre, extended, taps, w)
    return (
        dx.astype(x.dtype),
        dweight.astype(weight.dtype),
        None if bias is None else dbias.astype(bias.dtype),
        None if states is None else dstates.astype(states.dtype),
        None,
    )


def _before_activation(x, weight, bias, states, taps) -> Float[Array, "b t e"]:
    (_, t, e), w = x.shape, weight.shape[1]
    wide = _wide(x, weight, bias, states)
    weight = weight.astype(wide)
    start = jnp.zeros((e,), wide) if bias is None else bias.astype(wide)
    pre = start[None, None]
    if taps is not None:
        extended = _extended(x, states)
        for j in range(w):
            pre = pre + _rows(extended, taps[..., j]).astype(wide) * weight[:, j][None, None]
        return pre
    if states is None:
        for j in range(w):
            pre = pre + _shifted(x, w - 1 - j).astype(wide) * weight[:, j][None, None]
        return pre
    extended = _extended(x, states)
    for j in range(w):
        pre = pre + extended[:, j : j + t].astype(wide) * weight[:, j][None, None]
    return pre


def _input_gradients(dpre, weight, states, taps):
    """Returns the gradients of x and of the states: each row gathers from the tokens it fed."""
    w, num_states = weight.shape[1], 0 if states is None else states.shape[1]
    if taps is not None:
        readers = tap_rows.readers(taps, num_states)
        dextended = sum(_rows(dpre, readers[..., j]) * weight[:, j][None, None] for j in range(w))
        return dextended[:, num_states:], dextended[:, :num_states]
    dx = sum(_shifted(dpre, -(w - 1 - j)) * weight[:, j][None, None] for j in range(w))
    if states is None:
        return dx, None
    head = jnp.pad(dpre[:, : w - 1], ((0, 0), (0, max(w - 1 - dpre.shape[1], 0)), (0, 0)))
    dstates = sum(_shifted(head, j) * weight[:, j][None, None] for j in range(w - 1))
    return dx, dstates


def _tap_sums_reduced(dpre, extended, taps, w: int):
    """Returns the gradients of weight and bias as plain reductions, which GPUs do well."""
    t = dpre.shape[1]
    columns = []
    for j in range(w):
        read = extended[:, j : j + t] if taps is None else _rows(extended, taps[..., j])
        columns.append(jnp.sum(dpre * read.astype(dpre.dtype), axis=(0, 1)))
    return jnp.stack(columns, axis=1), jnp.sum(dpre, axis=(0, 1))


def _tap_sums_scanned(dpre, extended, taps, w: int):
    """The same as a loop over time, many times faster than what XLA makes of the sums on a CPU."""
    b, t, e = dpre.shape

    def token(sums, i):
        dweight, dbias = sums
        now = jax.lax.dynamic_slice_in_dim(dpre, i, 1, axis=1)
        if taps is None:
            read = jax.lax.dynamic_slice_in_dim(extended, i, w, axis=1)
        else:
            read = _rows(extended, jax.lax.dynamic_slice_in_dim(taps, i, 1, axis=1)[:, 0])
        return (dweight + now * read.astype(now.dtype), dbias + now[:, 0]), None

    zeros = (jnp.zeros((b, w, e), dpre.dtype), jnp.zeros((b, e), dpre.dtype))
    (dweight, dbias), _ = jax.lax.scan(token, zeros, jnp.arange(t))
    return jnp.sum(dweight, axis=0).T, jnp.sum(dbias, axis=0)


def _shifted(values: Float[Array, "b t e"], by: int) -> Float[Array, "b t e"]:
    """values[t - by] at t, zero where there is none."""
    t = values.shape[1]
    if by >= 0:
        return _shifted_in(values, by)[:, :t]
    return jnp.pad(values, ((0, 0), (0, -by), (0, 0)))[:, -t:]


def _shifted_in(values: Float[Array, "b t e"], num_zeros: int) -> Float[Array, "b r e"]:
    """Puts zero rows before `values`."""
    return jnp.pad(values, ((0, 0), (num_zeros, 0), (0, 0)))


def _rows(values: Float[Array, "b r e"], index: Int[Array, "b q"]) -> Float[Array, "b q e"]:
    """values[index] along time, zero where the index is negative."""
    rows = jnp.take_along_axis(
        values, jnp.maximum(index, 0)[..., None], axis=1, mode="promise_in_bounds"
    )
    return jnp.where(index[..., None] >= 0, rows, 0)


def _extended(x: Array, states: Array | None) -> Array:
    return x if states is None else jnp.concatenate([states, x], axis=1)


def _wide(*arrays: Array | None) -> jnp.dtype:
    return jnp.result_type(jnp.float32, *[array for array in arrays if array is not None])


_convolve.defvjp(_forward, _backward)
