# SPDX-License-Identifier: Apache-2.0
"""`ssd` on Hopper: from the op's arguments to the kernels, and their gradient rule.

The kernels know only 64 channels, 64 tokens, n a multiple of 64. What brings a call there (heads
of 128 channels become two heads, of 32 are padded; time and n are padded with zeros) and what
makes steps and decays is ordinary JAX around one function with a gradient rule, `_scan`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from pallas_kernels import chunking, devices, packing
from pallas_kernels.ssd import mosaic_config, mosaic_rows
from pallas_kernels.ssd.mosaic_backward import X_DY, backward
from pallas_kernels.ssd.mosaic_forward import forward
from pallas_kernels.ssd.mosaic_states import join_segments, states
from pallas_kernels.ssd.mosaic_sums import decay_rows
from pallas_kernels.ssd.mosaic_tiles import P, Q

HEADDIMS = (32, 64, 128, 256)
# Blocks along one axis of a grid.
LARGEST_GRID = 2**16


def supports(device: devices.Device, arguments: dict) -> str | None:
    """Hopper, bf16, the usual head and state sizes, one state per row."""
    if (reason := devices.mosaic_refusal(device)) is not None:
        return reason
    if arguments["x"].dtype != jnp.bfloat16:
        return f"x, B, C and z must be bfloat16, not {arguments['x'].dtype}"
    if arguments["num_documents"] is not None:
        return "num_documents (a state per document) is not implemented"
    wide = [k for k, v in arguments.items() if getattr(v, "dtype", None) == jnp.float64]
    if wide:
        return f"computes in float32, and {', '.join(wide)} is float64"
    (b, t, _, p), n = arguments["x"].shape, arguments["B"].shape[3]
    if max(b, t // Q) >= LARGEST_GRID:
        return f"b and t / {Q} must be below {LARGEST_GRID}, not {b} and {t // Q}"
    if p not in HEADDIMS:
        return f"headdim p must be one of {HEADDIMS}, not {p}"
    if n % 16 or n > 128:
        return f"d_state n must be a multiple of 16 up to 128, not {n}"
    return None


class Static(NamedTuple):
    """What the kernels are compiled for beside shapes; `interpret` is None on the GPU."""

    interpret: object = None


COMPILED = Static()


def run(
    x: Float[Array, "b t h p"],
    dt: Float[Array, "b t h"],
    A: Float[Array, "h"],
    B: Float[Array, "b t g n"],
    C: Float[Array, "b t g n"],
    D: Float[Array, "h"] | Float[Array, "h p"] | None,
    z: Float[Array, "b t h p"] | None,
    dt_bias: Float[Array, "h"] | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    seq_idx: Int[Array, "b t"] | None,
    initial_state: Float[Array, "b h p n"] | None,
    num_documents: int | None,
    chunk_size: int | None,
    static: Static = COMPILED,
) -> tuple[Float[Array, "b t h p"], Float[Array, "b h p n"]]:
    """See `ssd`; `chunk_size` is always 64 here."""
    (b, t, h, p), n = x.shape, B.shape[3]
    is_real = starts = None
    if seq_idx is not None:
        documents = packing.resolve(seq_idx)
        is_real, starts = documents.is_real, documents.starts
        x, B, C, z = (_zero_padding(values, is_real) for values in (x, B, C, z))
    step, decay = mosaic_rows.steps_and_decays(
        dt, A, dt_bias, dt_softplus, dt_limit, is_real, starts
    )
    # Heads of more than 64 channels are several heads with the same decays, B and C.
    parts = max(1, p // P)
    x, z = (_to_tiles(values, parts) for values in (x, z))
    step, decay = (mosaic_rows.chunked(_pad_time(values)) for values in (step, decay))
    step, decay = (jnp.repeat(values, parts, axis=2) for values in (step, decay))
    B, C = (_pad_last(_pad_time(values), P) for values in (B, C))
    if D is not None:
        D = D.astype(jnp.float32)
        D = jnp.repeat(D, parts) if D.ndim == 1 else _pad_last(D.reshape(h * parts, -1), P)
    if initial_state is not None:
        initial_state = initial_state.astype(jnp.float32).reshape(b, h * parts, -1, n)
        initial_state = _pad_last(_pad_last(initial_state, P).swapaxes(2, 3), P).swapaxes(2, 3)
    y, state = _scan(static, x, step, decay, B, C, D, z, initial_state)
    width = min(p, P)
    y = y[:, :t, :, :width].reshape(b, t, h, p)
    return y, state[:, :, :width, :n].reshape(b, h, p, n)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(static, x, step, decay, B, C, D, z, initial):
    """x, z (b,t,h,64); step, log2 decay (b,c,h,64); B, C (b,t,g,n); D (h,) or (h,64)."""
    y, state, _ = _forward(static, x, step, decay, B, C, D, z, initial, ungated=False)
    return y, state


def _forward(static, x, step, decay, B, C, D, z, initial, *, ungated):
    """Returns y, the final state, and what the backward pass keeps beside the inputs."""
    b, t, h, _ = x.shape
    g = B.shape[2]
    config = mosaic_config.choose_forward(b, t // Q, h, g, gated=z is not None)
    rows = decay_rows(step, decay, for_backward=False, interpret=static.interpret)
    entering = None if initial is None else initial[:, None]
    if config.segments > 1:
        layout = mosaic_config.choose_states(b, t // Q, h, g, config.segments)
        local, _ = states(x, rows, B, None, layout, backwards=False, interpret=static.interpret)
        entering = join_segments(local, decay.sum(-1), initial, backwards=False)
    skip = jnp.broadcast_to(D[:, None], (h, P)) if D is not None and D.ndim == 1 else D
    y, before_gate, leaving = forward(
        x, rows, B, C, skip, z, entering, config, ungated=ungated, interpret=static.interpret
    )
    return y, leaving[:, -1], (before_gate, entering)


def _scan_forward(static, *primals):
    primals = [None if primal is None else primal.value for primal in primals]
    y, state, kept = _forward(static, *primals, ungated=True)
    return (y, state), (*primals, kept)


def _scan_backward(static, residuals, cotangents):
    x, step, decay, B, C, D, z, initial, (before_gate, entering) = residuals
    dy, dstate = cotangents
    if isinstance(dy, SymbolicZero):
        dy = jnp.zeros_like(x)
    if isinstance(dstate, SymbolicZero):
        dstate = None
    b, t, h, _ = x.shape
    g, n = B.shape[2:]
    dz = None
    if z is not None:
        dy, dz = _ungate(dy, before_gate, z)
    rows = decay_rows(step, decay, for_backward=True, interpret=static.interpret)
    segments = 1 if entering is None else entering.shape[1]
    layout = mosaic_config.choose_states(b, t // Q, h, g, segments)
    walk = functools.partial(states, config=layout, gradient_rows=True, interpret=static.interpret)
    _, S = walk(x, rows, B, entering, backwards=False, store=True, final=False)
    returning = None if dstate is None else dstate[:, None]
    if segments > 1:
        local, _ = walk(dy, rows, C, None, backwards=True)
        returning = join_segments(local, decay.sum(-1), dstate, backwards=True)
    dinitial, R = walk(
        dy, rows, C, returning, backwards=True, store=True, final=initial is not None
    )
    skip = jnp.broadcast_to(D[:, None], (h, P)) if D is not None and D.ndim == 1 else D
    dx, dB, dC, sums = backward(
        x,
        dy,
        rows,
        B,
        C,
        skip,
        S,
        R,
        mosaic_config.choose_backward(b, t // Q, h, g),
        interpret=static.interpret,
    )
    dstep, ddecay = mosaic_rows.decay_gradient(step, decay, sums, static.interpret)
    if dB.dtype != B.dtype:
        dB, dC = (d.reshape(b, t, g, -1, n).sum(3).astype(B.dtype) for d in (dB, dC))
    dD = None
    if D is not None and D.ndim == 1:
        dD = sums[..., X_DY, :].sum((0, 1, 3))
    elif D is not None:
        dD = jnp.einsum("bthp,bthp->hp", x, dy, preferred_element_type=jnp.float32)
    return dx, dstep, ddecay, dB, dC, dD, dz, None if initial is None else dinitial[:, 0]


_scan.defvjp(_scan_forward, _scan_backward, symbolic_zeros=True)


def _ungate(dy, before_gate, z):
    """Gradients of y before the gate and of z, from that of y = before_gate * silu(z)."""
    dy, before_gate, wide = (v.astype(jnp.float32) for v in (dy, before_gate, z))
    gate = jax.nn.sigmoid(wide)
    dz = dy * before_gate * gate * (1 + wide * (1 - gate))
    return (dy * wide * gate).astype(z.dtype), dz.astype(z.dtype)


def _zero_padding(values, is_real):
    """Zero at padding, whatever stands there."""
    if values is None:
        return None
    return jnp.where(is_real[:, :, None, None], values, jnp.zeros((), values.dtype))


def _to_tiles(values, parts: int):
    """(b, t, h, p) to (b, t', h * parts, 64) with t' a multiple of 64."""
    if values is None:
        return None
    b, t, h, p = values.shape
    return _pad_last(_pad_time(values.reshape(b, t, h * parts, p // parts)), P)


def _pad_time(values):
    return chunking.pad_time(values, Q)


def _pad_last(values, multiple: int):
    missing = -values.shape[-1] % multiple
    if not missing:
        return values
    return jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
