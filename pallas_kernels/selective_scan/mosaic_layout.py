# SPDX-License-Identifier: Apache-2.0
"""From the arrays of `selective_scan` to those of its Mosaic kernels, and back.

The kernels want channels in whole blocks that lie in one group, times in whole tiles, states before
channels, and B, C and the marks of documents in one float32 row a token. Knows no kernel.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.selective_scan.mosaic_steps import CHANNELS, RESTART, TILE, Plan

# Of one H200 at the kernels' register counts; a tie between segment counts goes to the smaller.
_MULTIPROCESSORS = 132
# Cycles one tile's token takes: alone on a multiprocessor (latency), and per program on a full one.
_ALONE, _EACH = 350, 165
# A split sequence is walked about twice: once for the states alone.
_TWICE = 1.9


def make_plan(x, n: int, groups: int, *, has_z: bool, softplus: bool, has_seq_idx: bool) -> Plan:
    """Returns the padded sizes of a call on x (b, t, e) with n states."""
    b, t, e = x.shape
    per_group = -(-(e // groups) // CHANNELS)
    padded_t = -(-t // TILE) * TILE
    return Plan(
        b=b,
        t=padded_t,
        e=groups * per_group * CHANNELS,
        n=n,
        blocks_per_group=per_group,
        segments=count_segments(b * groups * per_group, padded_t // TILE),
        has_z=has_z,
        softplus=softplus,
        has_flags=has_seq_idx or padded_t != t,
        rough=x.dtype == jnp.bfloat16,
    )


def count_segments(programs: int, tiles: int) -> int:
    """Returns into how many segments to cut a sequence that `programs` would walk whole."""

    def time(segments: int) -> float:
        resident = -(-programs * segments // _MULTIPROCESSORS)
        walks = 1.0 if segments == 1 else _TWICE
        return walks * -(-tiles // segments) * max(_ALONE, _EACH * resident)

    # At least four tiles a segment, and no more programs than are resident at once.
    most = max(1, min(tiles // 4, 4 * _MULTIPROCESSORS // programs))
    best = min(range(1, most + 1), key=time)
    # As many as the length of a segment leaves.
    return -(-tiles // -(-tiles // best))


def pad_channels(values: Array, groups: int, plan: Plan) -> Array:
    """Pads the last axis (channels), group by group, with zeros."""
    e = values.shape[-1]
    if e == plan.e:
        return values
    grouped = values.reshape(*values.shape[:-1], groups, e // groups)
    missing = plan.e // groups - e // groups
    padded = jnp.pad(grouped, [(0, 0)] * (grouped.ndim - 1) + [(0, missing)])
    return padded.reshape(*values.shape[:-1], plan.e)


def cut_channels(values: Array, groups: int, e: int) -> Array:
    """Undoes `pad_channels`."""
    if values.shape[-1] == e:
        return values
    grouped = values.reshape(*values.shape[:-1], groups, -1)[..., : e // groups]
    return grouped.reshape(*values.shape[:-1], e)


def pad_sequence(
    values: Float[Array, "b t e"], seq_idx: Int[Array, "b t"] | None, groups: int, plan: Plan
) -> Array:
    """Pads times and channels of x, dt, z or a cotangent with zeros, also where padding stands."""
    if seq_idx is not None:
        values = jnp.where((seq_idx >= 0)[:, :, None], values, 0)
    missing = plan.t - values.shape[1]
    values = jnp.pad(values, [(0, 0), (0, missing), (0, 0)]) if missing else values
    return pad_channels(values, groups, plan)


def rows_of_tokens(
    B: Float[Array, "b t g n"],
    C: Float[Array, "b t g n"],
    seq_idx: Int[Array, "b t"] | None,
    plan: Plan,
) -> Float[Array, "b g t+ row"]:
    """One float32 row a token and group: B, C and, if the plan has them, the marks."""
    b, t, groups, _ = B.shape
    if seq_idx is not None:
        is_real = (seq_idx >= 0)[:, :, None, None]
        B, C = jnp.where(is_real, B, 0), jnp.where(is_real, C, 0)
    parts = [B.astype(jnp.float32), C.astype(jnp.float32)]
    if plan.has_flags:
        restart, real = _marks(seq_idx, b, t)
        marks = jnp.stack([restart, real, jnp.zeros_like(real), jnp.zeros_like(real)], axis=-1)
        parts.append(jnp.broadcast_to(marks[:, :, None], (b, t, groups, 4)))
    rows = jnp.concatenate(parts, axis=-1).swapaxes(1, 2)
    return jnp.pad(rows, [(0, 0), (0, 0), (0, plan.t - t), (0, 0)])


def _marks(seq_idx: Int[Array, "b t"] | None, b: int, t: int) -> tuple[Array, Array]:
    """(RESTART where a document starts else 0, 1 for a real token else 0) of every token."""
    if seq_idx is None:
        return jnp.zeros((b, t)), jnp.ones((b, t))
    is_real = seq_idx >= 0
    # Position of the last real token up to each token; -1 before the first.
    positions = jnp.where(is_real, jnp.arange(t)[None], -1)
    last = jax.lax.cummax(positions, axis=1)
    before = jnp.pad(last[:, :-1], [(0, 0), (1, 0)], constant_values=-1)
    previous = jnp.take_along_axis(seq_idx, jnp.maximum(before, 0), axis=1)
    starts = is_real & (before >= 0) & (previous != seq_idx)
    return jnp.where(starts, RESTART, 0.0), is_real.astype(jnp.float32)


def segment_decays(
    sums: Float[Array, "b segments e"],
    rate: Float[Array, "n e"],
    rows: Float[Array, "b g t row"],
    plan: Plan,
) -> Float[Array, "b segments n e"]:
    """The product of a segment's decays, exp(A * sum of steps); 0 if a document starts in it."""
    decays = jnp.exp2(sums[:, :, None] * rate[None, None])
    if not plan.has_flags:
        return decays
    starts = rows[:, 0, :, 2 * plan.n] < 0
    padded = plan.segments * plan.tiles_per_segment * TILE
    starts = jnp.pad(starts, [(0, 0), (0, padded - plan.t)])
    has_start = jnp.any(starts.reshape(plan.b, plan.segments, -1), axis=-1)
    return jnp.where(has_start[:, :, None, None], 0.0, decays)


def carry_forward(
    first: Float[Array, "b n e"],
    local: Float[Array, "b segments n e"],
    decays: Float[Array, "b segments n e"],
) -> Float[Array, "b segments n e"]:
    """The state before each segment, from `first` and each segment's state walked from zero."""
    states = [first]
    for k in range(local.shape[1] - 1):
        states.append(decays[:, k] * states[-1] + local[:, k])
    return jnp.stack(states, axis=1)


def carry_backward(
    last: Float[Array, "b n e"],
    local: Float[Array, "b segments n e"],
    decays: Float[Array, "b segments n e"],
) -> Float[Array, "b segments n e"]:
    """The state's cotangent after each segment; `carry_forward` against time."""
    return carry_forward(last, local[:, ::-1], decays[:, ::-1])[:, ::-1]
