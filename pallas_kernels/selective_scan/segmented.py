# SPDX-License-Identifier: Apache-2.0
"""`selective_scan` from four kernels that walk segments of the sequence; which kernels, is given.

The sequence is cut into segments where rows and channels alone would leave the card idle. Their
states are found first (each walked from zero, then joined by the product of its decays), then all
segments are walked at once from the right state; the same backward for the state's cotangent.
More than 16 states a channel are as many scans of up to 16 whose outputs are added.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.selective_scan import mosaic_layout as layout
from pallas_kernels.selective_scan.mosaic_steps import LOG2E

_MOST_STATES = 16


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The four kernels, with the signatures of `mosaic_forward` and `mosaic_backward`."""

    scan: Callable
    segment_states: Callable
    scan_gradients: Callable
    segment_carries: Callable


@dataclasses.dataclass(frozen=True)
class _Options:
    kernels: Kernels
    softplus: bool
    out_dtype: jnp.dtype
    interpret: object


def refusal(arguments: dict) -> str | None:
    """Returns why the kernels cannot run these arguments on any device, or None."""
    if arguments["num_documents"] is not None:
        return "num_documents: the kernels carry one state per row"
    for name in ("B", "C"):
        if arguments[name].ndim == 2:
            return f"{name} is constant over time; the kernels read one row a token"
    for name in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state"):
        value = arguments[name]
        if value is not None and value.dtype not in (jnp.bfloat16, jnp.float32):
            return f"{name} is {value.dtype}; the kernels take bfloat16 and float32"
    n = arguments["A"].shape[1]
    if n > 256:
        return f"n={n} states per channel; the kernels take at most 256"
    return None


def run(
    kernels: Kernels,
    *,
    x: Float[Array, "b t e"],
    dt: Float[Array, "b t e"],
    A: Float[Array, "e n"],
    B: Float[Array, "b t g n"],
    C: Float[Array, "b t g n"],
    D: Float[Array, "e"] | None,
    z: Float[Array, "b t e"] | None,
    dt_bias: Float[Array, "e"] | None,
    dt_softplus: bool,
    seq_idx: Int[Array, "b t"] | None,
    initial_state: Float[Array, "b e n"] | None,
    num_documents: int | None,
    interpret=None,
) -> tuple[Float[Array, "b t e"], Float[Array, "b e n"]]:
    """See `selective_scan`. `interpret`: parameters of Pallas' GPU interpreter, for tests."""
    del num_documents
    (b, _, e), n = x.shape, A.shape[1]
    D_or_zero = jnp.zeros((e,)) if D is None else D
    bias = jnp.zeros((e,)) if dt_bias is None else dt_bias
    state = jnp.zeros((b, e, n)) if initial_state is None else initial_state
    if n <= _MOST_STATES:
        options = _Options(kernels, dt_softplus, x.dtype, interpret)
        return _scan(options, x, dt, z, A, B, C, D_or_zero, bias, state, seq_idx)
    options = _Options(kernels, dt_softplus, jnp.dtype(jnp.float32), interpret)
    total, states = x.astype(jnp.float32) * D_or_zero[None, None], []
    for k in range(0, n, _MOST_STATES):
        some = slice(k, k + _MOST_STATES)
        y, end = _scan(
            options, x, dt, None, A[:, some], B[..., some], C[..., some],
            jnp.zeros((e,)), bias, state[..., some], seq_idx,
        )  # fmt: skip
        total, states = total + y, [*states, end]
    total = total if z is None else total * jax.nn.silu(z.astype(jnp.float32))
    total = total if seq_idx is None else jnp.where(seq_idx[..., None] >= 0, total, 0)
    return total.astype(x.dtype), jnp.concatenate(states, axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(options, x, dt, z, A, B, C, D, bias, state, seq_idx):
    """(y, final state) for at most 16 states a channel."""
    y, end, _ = _forward(options, x, dt, z, A, B, C, D, bias, state, seq_idx, keep=False)
    return y, end


def _forward(options, x, dt, z, A, B, C, D, bias, state, seq_idx, *, keep):
    groups, e, t = B.shape[2], x.shape[2], x.shape[1]
    plan = _plan(options, x, z, A, B, seq_idx)
    inputs = _inputs(x, dt, z, A, B, C, D, bias, seq_idx, plan)
    first = layout.pad_channels(_states(state, plan.n).swapaxes(1, 2), groups, plan)
    if plan.segments == 1:
        states = first[:, None]
    else:
        local, sums = options.kernels.segment_states(
            inputs["x"], inputs["dt"], inputs["rows"], inputs["rate"], inputs["bias"], plan,
            interpret=options.interpret,
        )  # fmt: skip
        decays = layout.segment_decays(sums, inputs["rate"], inputs["rows"], plan)
        states = layout.carry_forward(first, local, decays)
    y, ends, kept = options.kernels.scan(
        **inputs, states=states, plan=plan, out_dtype=options.out_dtype, keep=keep,
        interpret=options.interpret,
    )  # fmt: skip
    end = layout.cut_channels(ends[:, -1], groups, e).swapaxes(1, 2)[..., : A.shape[1]]
    return layout.cut_channels(y, groups, e)[:, :t], end, kept


def _plan(options, x, z, A, B, seq_idx):
    n = -(-A.shape[1] // 4) * 4
    return layout.make_plan(
        x, n, B.shape[2], has_z=z is not None, softplus=options.softplus,
        has_seq_idx=seq_idx is not None,
    )  # fmt: skip


def _inputs(x, dt, z, A, B, C, D, bias, seq_idx, plan) -> dict:
    groups = B.shape[2]

    def channels(value):
        return layout.pad_channels(value.astype(jnp.float32), groups, plan)

    def sequence(value):
        return layout.pad_sequence(value, seq_idx, groups, plan)

    return {
        "x": sequence(x),
        "dt": sequence(dt),
        "z": None if z is None else sequence(z),
        "rows": layout.rows_of_tokens(_states(B, plan.n), _states(C, plan.n), seq_idx, plan),
        "rate": channels(_states(A, plan.n).T * LOG2E),
        "D": channels(D),
        "bias": channels(bias),
    }


def _states(values: Array, n: int) -> Array:
    """Pads the last axis, states, with zeros, as float32."""
    missing = n - values.shape[-1]
    return jnp.pad(values.astype(jnp.float32), [(0, 0)] * (values.ndim - 1) + [(0, missing)])


def _scan_fwd(options, x, dt, z, A, B, C, D, bias, state, seq_idx):
    y, end, kept = _forward(options, x, dt, z, A, B, C, D, bias, state, seq_idx, keep=True)
    return (y, end), (x, dt, z, A, B, C, D, bias, state, seq_idx, kept)


def _scan_bwd(options, residuals, cotangents):
    x, dt, z, A, B, C, D, bias, state, seq_idx, kept = residuals
    dy, dend = cotangents
    (b, t, e), n, groups = x.shape, A.shape[1], B.shape[2]
    plan = _plan(options, x, z, A, B, seq_idx)
    inputs = _inputs(x, dt, z, A, B, C, D, bias, seq_idx, plan)
    dy = layout.pad_sequence(dy, seq_idx, groups, plan)
    last = layout.pad_channels(_states(dend, plan.n).swapaxes(1, 2), groups, plan)
    if plan.segments == 1:
        carries = last[:, None]
    else:
        local, sums = options.kernels.segment_carries(
            inputs["dt"], inputs["z"], dy, inputs["rows"], inputs["rate"], inputs["bias"], plan,
            interpret=options.interpret,
        )  # fmt: skip
        decays = layout.segment_decays(sums, inputs["rate"], inputs["rows"], plan)
        carries = layout.carry_backward(last, local, decays)
    gradients = options.kernels.scan_gradients(
        **inputs, dy=dy, kept=kept, carries=carries, plan=plan, interpret=options.interpret
    )

    def cut(value):
        return layout.cut_channels(value, groups, e)

    def by_channel(value):
        return cut(jnp.sum(value, axis=(0, 1)))

    # (b, blocks, t, 2 n) → (b, t, g, n) twice.
    drows = gradients["rows"].reshape(b, groups, plan.blocks_per_group, plan.t, 2 * plan.n)
    dB, dC = jnp.split(jnp.sum(drows, axis=2)[:, :, :t].swapaxes(1, 2), 2, axis=-1)
    return (
        cut(gradients["x"])[:, :t],
        cut(gradients["dt"])[:, :t],
        None if z is None else cut(gradients["z"])[:, :t],
        by_channel(gradients["A"])[:n].T.astype(A.dtype),
        dB[..., :n].astype(B.dtype),
        dC[..., :n].astype(C.dtype),
        by_channel(gradients["D"]).astype(D.dtype),
        by_channel(gradients["bias"]).astype(bias.dtype),
        cut(gradients["carry"][:, 0]).swapaxes(1, 2)[..., :n].astype(state.dtype),
        None,
    )


_scan.defvjp(_scan_fwd, _scan_bwd)
