# SPDX-License-Identifier: Apache-2.0
"""Forward kernels of `selective_scan` in Mosaic GPU: the outputs, and states alone.

`scan` walks every segment of the sequence from a given state; `segment_states` walks it from zero
and keeps the last state and the sum of the steps, from which `mosaic.py` finds the given states.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.selective_scan import mosaic_steps as steps
from pallas_kernels.selective_scan.mosaic_steps import CHANNELS, TILE, Plan

_STAGES = 3
# Tokens whose code is one straight line: a tile's where two programs share a multiprocessor, fewer
# (and fewer registers) where a split sequence puts four there.
_GROUP, _SPLIT_GROUP = TILE, 4


def scan(
    x: Float[Array, "b t e"],
    dt: Float[Array, "b t e"],
    z: Float[Array, "b t e"] | None,
    rows: Float[Array, "b g t row"],
    rate: Float[Array, "n e"],
    D: Float[Array, "e"],
    bias: Float[Array, "e"],
    states: Float[Array, "b segments n e"],
    plan: Plan,
    *,
    out_dtype,
    keep: bool,
    interpret=None,
) -> tuple[Array, Array, Array | None]:
    """Returns (y, state after each segment, state before each tile if `keep`)."""
    n, size = plan.n, _GROUP if plan.segments == 1 else _SPLIT_GROUP

    def body(*refs):
        refs = list(refs)
        x_g, dt_g = refs.pop(0), refs.pop(0)
        z_g = refs.pop(0) if plan.has_z else None
        rows_g, rate_g, D_g, bias_g, states_g, y_g, end_g = refs[:7]
        kept_g = refs[7] if keep else None
        x_s, dt_s, rows_s, y_s, full = refs[7 + keep : 12 + keep]
        z_s = refs[12 + keep] if plan.has_z else None
        row, block, segment = steps.block_indices()
        channels = pl.ds(block * CHANNELS, CHANNELS)
        first, count = segment_tiles(segment, plan)

        def fetch(i, slot):
            times = pl.ds((first + i) * TILE, TILE)
            pairs = [(x_g, x_s), (dt_g, dt_s)] + ([(z_g, z_s)] if plan.has_z else [])
            for source, target in pairs:
                plgpu.copy_gmem_to_smem(
                    source.at[row, times, channels], target.at[slot], full.at[slot]
                )
            group = lax.div(block, jnp.int32(plan.blocks_per_group))
            plgpu.copy_gmem_to_smem(rows_g.at[row, group, times], rows_s.at[slot], full.at[slot])

        for stage in range(_STAGES):
            pl.when(stage < count)(lambda stage=stage: fetch(stage, stage))
        rates = [steps.load(rate_g.at[i, channels]) for i in range(n)]
        skip, shift = steps.load(D_g.at[channels]), steps.load(bias_g.at[channels])
        h = tuple(steps.load(states_g.at[row, segment, i, channels]) for i in range(n))

        def tile(i, h):
            slot, out = lax.rem(i, jnp.int32(_STAGES)), lax.rem(i, jnp.int32(2))
            plgpu.barrier_wait(full.at[slot])
            if keep:
                for k in range(n):
                    kept_g[row, first + i, k, channels] = h[k]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)

            def group(j, h):
                tokens = [j * size + u for u in range(size)]
                xs = [steps.load(x_s.at[slot, token]) for token in tokens]
                dts = [steps.load(dt_s.at[slot, token]) for token in tokens]
                zs = [steps.load(z_s.at[slot, token]) for token in tokens] if plan.has_z else []
                ys = []
                for u, token in enumerate(tokens):
                    restart, real = steps.flags(rows_s, slot, token, plan)
                    step = steps.step_size(dts[u], shift, plan, real)
                    h = advance(h, step, xs[u], rates, rows_s, slot, token, restart)
                    y = skip * xs[u]
                    for k in range(n):
                        y = y + h[k] * rows_s[slot, token, n + k]
                    y = y * (zs[u] * steps.sigmoid(zs[u], plan)) if plan.has_z else y
                    ys.append(y if real is None else y * real)
                for u, token in enumerate(tokens):
                    y_s[out, token] = ys[u].astype(y_s.dtype)
                return h

            h = lax.fori_loop(0, TILE // size, group, h)
            plgpu.commit_smem()
            times = pl.ds((first + i) * TILE, TILE)
            plgpu.copy_smem_to_gmem(y_s.at[out], y_g.at[row, times, channels])
            pl.when(i + _STAGES < count)(lambda: fetch(i + _STAGES, slot))
            return h

        h = lax.fori_loop(0, count, tile, h)
        for k in range(n):
            end_g[row, segment, k, channels] = h[k]
        plgpu.wait_smem_to_gmem(0)

    f32 = jnp.float32
    per_segment = jax.ShapeDtypeStruct((plan.b, plan.segments, n, plan.e), f32)
    out_type = [jax.ShapeDtypeStruct(x.shape, out_dtype), per_segment]
    if keep:
        out_type.append(jax.ShapeDtypeStruct((plan.b, plan.tiles, n, plan.e), f32))

    def tile_type(dtype):
        return plgpu.SMEM((_STAGES, TILE, CHANNELS), dtype)

    scratch = [
        tile_type(x.dtype),
        tile_type(dt.dtype),
        plgpu.SMEM((_STAGES, TILE, plan.row), f32),
        plgpu.SMEM((2, TILE, CHANNELS), out_dtype),
        plgpu.Barrier(num_arrivals=3 + plan.has_z, num_barriers=_STAGES),
    ]
    scratch += [tile_type(z.dtype)] if plan.has_z else []
    outputs = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=plan.grid,
        grid_names=steps.GRID_NAMES,
        compiler_params=steps.compiler_params(),
        interpret=interpret,
    )(x, dt, *([z] if plan.has_z else []), rows, rate, D, bias, states)
    return (*outputs, None)[:3]


def segment_states(
    x: Float[Array, "b t e"],
    dt: Float[Array, "b t e"],
    rows: Float[Array, "b g t row"],
    rate: Float[Array, "n e"],
    bias: Float[Array, "e"],
    plan: Plan,
    *,
    interpret=None,
) -> tuple[Float[Array, "b segments n e"], Float[Array, "b segments e"]]:
    """Returns (state after each segment walked from zero, sum of its steps)."""
    n, size = plan.n, _SPLIT_GROUP

    def body(x_g, dt_g, rows_g, rate_g, bias_g, end_g, sum_g, x_s, dt_s, rows_s, full):
        row, block, segment = steps.block_indices()
        channels = pl.ds(block * CHANNELS, CHANNELS)
        first, count = segment_tiles(segment, plan)

        def fetch(i, slot):
            times = pl.ds((first + i) * TILE, TILE)
            for source, target in ((x_g, x_s), (dt_g, dt_s)):
                plgpu.copy_gmem_to_smem(
                    source.at[row, times, channels], target.at[slot], full.at[slot]
                )
            group = lax.div(block, jnp.int32(plan.blocks_per_group))
            plgpu.copy_gmem_to_smem(rows_g.at[row, group, times], rows_s.at[slot], full.at[slot])

        for stage in range(_STAGES):
            pl.when(stage < count)(lambda stage=stage: fetch(stage, stage))
        rates = [steps.load(rate_g.at[i, channels]) for i in range(n)]
        shift = steps.load(bias_g.at[channels])

        def tile(i, carry):
            slot = lax.rem(i, jnp.int32(_STAGES))
            plgpu.barrier_wait(full.at[slot])

            def group(j, carry):
                *h, total = carry
                for u in range(size):
                    token = j * size + u
                    restart, real = steps.flags(rows_s, slot, token, plan)
                    step = steps.step_size(steps.load(dt_s.at[slot, token]), shift, plan, real)
                    x = steps.load(x_s.at[slot, token])
                    h = advance(h, step, x, rates, rows_s, slot, token, restart)
                    total = total + step
                return (*h, total)

            carry = lax.fori_loop(0, TILE // size, group, carry)
            # Every lane has read the slot before it is filled again.
            plgpu.commit_smem()
            pl.when(i + _STAGES < count)(lambda: fetch(i + _STAGES, slot))
            return carry

        *h, total = lax.fori_loop(0, count, tile, tuple(steps.full(0.0) for _ in range(n + 1)))
        for k in range(n):
            end_g[row, segment, k, channels] = h[k]
        sum_g[row, segment, channels] = total

    f32 = jnp.float32
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((plan.b, plan.segments, n, plan.e), f32),
            jax.ShapeDtypeStruct((plan.b, plan.segments, plan.e), f32),
        ],
        scratch_types=[
            plgpu.SMEM((_STAGES, TILE, CHANNELS), x.dtype),
            plgpu.SMEM((_STAGES, TILE, CHANNELS), dt.dtype),
            plgpu.SMEM((_STAGES, TILE, plan.row), f32),
            plgpu.Barrier(num_arrivals=3, num_barriers=_STAGES),
        ],
        grid=plan.grid,
        grid_names=steps.GRID_NAMES,
        compiler_params=steps.compiler_params(),
        interpret=interpret,
    )(x, dt, rows, rate, bias)


def advance(h, step, x, rates, rows_s, slot, token, restart) -> tuple[jax.Array, ...]:
    """The states after one more token: decay * state + step * x * B."""
    weighted = step * x
    return tuple(
        steps.decay(step, rate, restart) * state + weighted * rows_s[slot, token, k]
        for k, (state, rate) in enumerate(zip(h, rates, strict=True))
    )


def segment_tiles(segment, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """(first tile, number of tiles) of a segment; the last one may be shorter."""
    first = segment * plan.tiles_per_segment
    return first, jnp.minimum(plan.tiles_per_segment, plan.tiles - first)
