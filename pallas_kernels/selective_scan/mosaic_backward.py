# SPDX-License-Identifier: Apache-2.0
"""Backward kernels of `selective_scan` in Mosaic GPU: all gradients, and carries alone.

`scan` walks a segment's tiles from the last to the first. In a tile it first walks forward from the
state kept before the tile, leaving the state before each group of tokens in shared memory, then
takes the groups from the last to the first: once more forward with the group's states and decays in
registers, then backward. The sums over channels that dB and dC need go through shared memory, where
a row per (token, state) is summed across the lanes in one fixed order: no atomics.

`segment_carries` walks the segments backward for the cotangent of the state alone.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.selective_scan import mosaic_steps as steps
from pallas_kernels.selective_scan.mosaic_forward import advance, segment_tiles
from pallas_kernels.selective_scan.mosaic_steps import CHANNELS, GROUP, LN2, TILE, Plan

_STAGES = 2
_GROUPS = TILE // GROUP
# Rows of the sums in four warps of four, a row on eight lanes of 16-byte vectors: each quarter warp
# reads 128 neighbouring bytes.
_SUMS = plgpu.Layout.TILED(
    plgpu.Tiling(((16, CHANNELS), (4, 32), (4,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)


def scan(
    x: Float[Array, "b t e"],
    dt: Float[Array, "b t e"],
    z: Float[Array, "b t e"] | None,
    rows: Float[Array, "b g t row"],
    rate: Float[Array, "n e"],
    D: Float[Array, "e"],
    bias: Float[Array, "e"],
    dy: Float[Array, "b t e"],
    kept: Float[Array, "b tiles n e"],
    carries: Float[Array, "b segments n e"],
    plan: Plan,
    *,
    interpret=None,
) -> dict[str, Array]:
    """Returns the gradients by name; those of A, D and bias per (row, segment), to be summed.

    "rows" (b, blocks, t * 2 n) holds dB and dC per block of channels; "carry" is the cotangent of
    the state before each segment.
    """
    n = plan.n
    # Tokens whose rows are summed over the channels at once: as few as make whole blocks of rows.
    summed = 1 if 2 * n % 16 == 0 else 2
    inputs = {"x": x, "dt": dt, "dy": dy} | ({"z": z} if plan.has_z else {})
    gated = ["x", "dt"] + (["z"] if plan.has_z else [])

    def body(*refs):
        refs = list(refs)
        input_g = {name: refs.pop(0) for name in inputs}
        rows_g, rate_g, D_g, bias_g, kept_g, carries_g = (refs.pop(0) for _ in range(6))
        output_g = {name: refs.pop(0) for name in gated}
        drows_g, dA_g, dD_g, dbias_g, carry_g = (refs.pop(0) for _ in range(5))
        input_s = {name: refs.pop(0) for name in inputs}
        output_s = {name: refs.pop(0) for name in gated}
        rows_s, states_s, sums_s, full = refs
        row, block, segment = steps.block_indices()
        channels = pl.ds(block * CHANNELS, CHANNELS)
        first, count = segment_tiles(segment, plan)
        last = first + count - 1

        def fetch(i, slot):
            times = pl.ds((last - i) * TILE, TILE)
            for name, source in input_g.items():
                target = input_s[name].at[slot]
                plgpu.copy_gmem_to_smem(source.at[row, times, channels], target, full.at[slot])
            group = lax.div(block, jnp.int32(plan.blocks_per_group))
            plgpu.copy_gmem_to_smem(rows_g.at[row, group, times], rows_s.at[slot], full.at[slot])

        for stage in range(_STAGES):
            pl.when(stage < count)(lambda stage=stage: fetch(stage, stage))
        rates = [steps.load(rate_g.at[k, channels]) for k in range(n)]
        skip, shift = steps.load(D_g.at[channels]), steps.load(bias_g.at[channels])
        carry = tuple(steps.load(carries_g.at[row, segment, k, channels]) for k in range(n))
        zero = steps.full(0.0)

        def tile(i, totals):
            slot = lax.rem(i, jnp.int32(_STAGES))
            index = last - i
            h = tuple(steps.load(kept_g.at[row, index, k, channels]) for k in range(n))
            plgpu.barrier_wait(full.at[slot])

            def token_step(token):
                restart, real = steps.flags(rows_s, slot, token, plan)
                dt = steps.load(input_s["dt"].at[slot, token])
                return steps.step_size(dt, shift, plan, real), restart, real

            def ahead(j, h):
                for k in range(n):
                    states_s[j, k] = h[k]
                for u in range(GROUP):
                    token = j * GROUP + u
                    step, restart, _ = token_step(token)
                    x = steps.load(input_s["x"].at[slot, token])
                    h = advance(h, step, x, rates, rows_s, slot, token, restart)
                return h

            h = lax.fori_loop(0, _GROUPS - 1, ahead, h)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            def add_up(token, side):
                rows = plgpu.load(sums_s.at[side], layout=_SUMS, optimized=False)
                at = pl.ds(token * 2 * n, summed * 2 * n)
                steps.store_sums(drows_g.at[row, block, at], jnp.sum(rows, axis=1))

            def back(j, carried):
                h, (carry, dA, dD, dbias) = carried
                group = _GROUPS - 1 - j
                history, decays, taken = [h], [], []
                for u in range(GROUP):
                    token = group * GROUP + u
                    step, restart, real = token_step(token)
                    x = steps.load(input_s["x"].at[slot, token])
                    decay = [steps.decay(step, rate, restart) for rate in rates]
                    weighted = step * x
                    history.append(
                        [
                            decay[k] * history[-1][k] + weighted * rows_s[slot, token, k]
                            for k in range(n)
                        ]
                    )
                    decays.append(decay)
                    taken.append((step, x, weighted, real))
                pending = None
                for u in reversed(range(GROUP)):
                    token = group * GROUP + u
                    step, x, weighted, real = taken[u]
                    dout = steps.load(input_s["dy"].at[slot, token])
                    dout = dout if real is None else dout * real
                    if plan.has_z:
                        z = steps.load(input_s["z"].at[slot, token])
                        y = skip * x
                        for k in range(n):
                            y = y + history[u + 1][k] * rows_s[slot, token, n + k]
                        gate = steps.sigmoid(z, plan)
                        dz = dout * y * (gate * (1.0 + z * (1.0 - gate)))
                        dout = dout * (z * gate)
                        output_s["z"][token] = dz.astype(output_s["z"].dtype)
                    dweighted, dstep = zero, zero
                    side, base = u // summed % 2, (u % summed) * 2 * n
                    new_carry, new_dA = [], []
                    for k in range(n):
                        dh = dout * rows_s[slot, token, n + k] + carry[k]
                        sums_s[side, base + k] = dh * weighted
                        sums_s[side, base + n + k] = dout * history[u + 1][k]
                        dweighted = dweighted + dh * rows_s[slot, token, k]
                        before = dh * decays[u][k]
                        through = before * history[u][k]
                        dstep = dstep + through * rates[k]
                        new_dA.append(dA[k] + through * step)
                        new_carry.append(before)
                    carry, dA = tuple(new_carry), tuple(new_dA)
                    dx = dweighted * step + skip * dout
                    ddt = dweighted * x + dstep * LN2
                    ddt = ddt * steps.softplus_slope(step, plan) if plan.softplus else ddt
                    ddt = ddt if real is None else ddt * real
                    dD, dbias = dD + dout * x, dbias + ddt
                    output_s["x"][token] = dx.astype(output_s["x"].dtype)
                    output_s["dt"][token] = ddt.astype(output_s["dt"].dtype)
                    if u % summed == 0:
                        # The other side's rows are in since the last barrier, and written again
                        # only after this one.
                        if pending is not None:
                            add_up(*pending)
                        steps.synchronize(interpret)
                        pending = (index * TILE + token, side)
                add_up(*pending)
                previous = jnp.maximum(group - 1, 0)
                h = tuple(steps.load(states_s.at[previous, k]) for k in range(n))
                return h, (carry, dA, dD, dbias)

            _, totals = lax.fori_loop(0, _GROUPS, back, (h, totals))
            plgpu.commit_smem()
            times = pl.ds(index * TILE, TILE)
            for name in gated:
                plgpu.copy_smem_to_gmem(output_s[name], output_g[name].at[row, times, channels])
            pl.when(i + _STAGES < count)(lambda: fetch(i + _STAGES, slot))
            return totals

        totals = (carry, tuple(zero for _ in range(n)), zero, zero)
        carry, dA, dD, dbias = lax.fori_loop(0, count, tile, totals)
        for k in range(n):
            carry_g[row, segment, k, channels] = carry[k]
            dA_g[row, segment, k, channels] = dA[k]
        dD_g[row, segment, channels] = dD
        dbias_g[row, segment, channels] = dbias
        plgpu.wait_smem_to_gmem(0)

    f32 = jnp.float32
    states = jax.ShapeDtypeStruct((plan.b, plan.segments, n, plan.e), f32)
    vector = jax.ShapeDtypeStruct((plan.b, plan.segments, plan.e), f32)
    out_type = {name: jax.ShapeDtypeStruct(x.shape, inputs[name].dtype) for name in gated}
    out_type["rows"] = jax.ShapeDtypeStruct((plan.b, plan.blocks, plan.t * 2 * n), f32)
    out_type |= {"A": states, "D": vector, "bias": vector, "carry": states}
    scratch = [plgpu.SMEM((_STAGES, TILE, CHANNELS), v.dtype) for v in inputs.values()]
    scratch += [plgpu.SMEM((TILE, CHANNELS), inputs[name].dtype) for name in gated]
    scratch += [
        plgpu.SMEM((_STAGES, TILE, plan.row), f32),
        plgpu.SMEM((_GROUPS - 1, n, CHANNELS), f32),
        plgpu.SMEM((2, summed * 2 * n, CHANNELS), f32),
        plgpu.Barrier(num_arrivals=len(inputs) + 1, num_barriers=_STAGES),
    ]
    outputs = plgpu.kernel(
        body,
        out_type=list(out_type.values()),
        scratch_types=scratch,
        grid=plan.grid,
        grid_names=steps.GRID_NAMES,
        compiler_params=steps.compiler_params(),
        interpret=interpret,
    )(*inputs.values(), rows, rate, D, bias, kept, carries)
    return dict(zip(out_type, outputs, strict=True))


def segment_carries(
    dt: Float[Array, "b t e"],
    z: Float[Array, "b t e"] | None,
    dy: Float[Array, "b t e"],
    rows: Float[Array, "b g t row"],
    rate: Float[Array, "n e"],
    bias: Float[Array, "e"],
    plan: Plan,
    *,
    interpret=None,
) -> tuple[Float[Array, "b segments n e"], Float[Array, "b segments e"]]:
    """Returns (cotangent of the state before each segment, from zero after it; sum of steps)."""
    n = plan.n
    inputs = {"dt": dt, "dy": dy} | ({"z": z} if plan.has_z else {})

    def body(*refs):
        refs = list(refs)
        input_g = {name: refs.pop(0) for name in inputs}
        rows_g, rate_g, bias_g, carry_g, sum_g = (refs.pop(0) for _ in range(5))
        input_s = {name: refs.pop(0) for name in inputs}
        rows_s, full = refs
        row, block, segment = steps.block_indices()
        channels = pl.ds(block * CHANNELS, CHANNELS)
        first, count = segment_tiles(segment, plan)
        last = first + count - 1

        def fetch(i, slot):
            times = pl.ds((last - i) * TILE, TILE)
            for name, source in input_g.items():
                target = input_s[name].at[slot]
                plgpu.copy_gmem_to_smem(source.at[row, times, channels], target, full.at[slot])
            group = lax.div(block, jnp.int32(plan.blocks_per_group))
            plgpu.copy_gmem_to_smem(rows_g.at[row, group, times], rows_s.at[slot], full.at[slot])

        for stage in range(_STAGES):
            pl.when(stage < count)(lambda stage=stage: fetch(stage, stage))
        rates = [steps.load(rate_g.at[k, channels]) for k in range(n)]
        shift = steps.load(bias_g.at[channels])

        def tile(i, carried):
            slot = lax.rem(i, jnp.int32(_STAGES))
            plgpu.barrier_wait(full.at[slot])

            def group(j, carried):
                *carry, total = carried
                for u in range(GROUP):
                    token = TILE - 1 - (j * GROUP + u)

                    def load(name, token=token):
                        return steps.load(input_s[name].at[slot, token])

                    restart, real = steps.flags(rows_s, slot, token, plan)
                    step = steps.step_size(load("dt"), shift, plan, real)
                    dout = load("dy") if real is None else load("dy") * real
                    if plan.has_z:
                        z = load("z")
                        dout = dout * (z * steps.sigmoid(z, plan))
                    carry = [
                        steps.decay(step, rates[k], restart)
                        * (dout * rows_s[slot, token, n + k] + carry[k])
                        for k in range(n)
                    ]
                    total = total + step
                return (*carry, total)

            carried = lax.fori_loop(0, _GROUPS, group, carried)
            # Every lane has read the slot before it is filled again.
            plgpu.commit_smem()
            pl.when(i + _STAGES < count)(lambda: fetch(i + _STAGES, slot))
            return carried

        zeros = tuple(steps.full(0.0) for _ in range(n + 1))
        *carry, total = lax.fori_loop(0, count, tile, zeros)
        for k in range(n):
            carry_g[row, segment, k, channels] = carry[k]
        sum_g[row, segment, channels] = total

    f32 = jnp.float32
    scratch = [plgpu.SMEM((_STAGES, TILE, CHANNELS), v.dtype) for v in inputs.values()]
    scratch += [
        plgpu.SMEM((_STAGES, TILE, plan.row), f32),
        plgpu.Barrier(num_arrivals=len(inputs) + 1, num_barriers=_STAGES),
    ]
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((plan.b, plan.segments, n, plan.e), f32),
            jax.ShapeDtypeStruct((plan.b, plan.segments, plan.e), f32),
        ],
        scratch_types=scratch,
        grid=plan.grid,
        grid_names=steps.GRID_NAMES,
        compiler_params=steps.compiler_params(),
        interpret=interpret,
    )(*inputs.values(), rows, rate, bias)
