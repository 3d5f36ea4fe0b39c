# SPDX-License-Identifier: Apache-2.0
"""The states between chunks, forwards and backwards in time, without any outputs.

One kernel, one warpgroup per head with the state in registers as in `mosaic_forward.py`:

    forwards    S = S * 2^p_last + sum_j step_j 2^(p_last - p_j) x_j B_j'      (state leaving)
    backwards   R = R * 2^p_last + sum_i 2^p_i dy_i C_i'           (its gradient, chunks reversed)

It serves to find the state entering each piece of a split sequence, and to store both states of
every chunk for the backward kernel. `join_segments` passes states from piece to piece.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ssd import mosaic_tiles as tiles
from pallas_kernels.ssd.mosaic_tiles import FLOAT, HALF, MATRIX, P, Q


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is laid out: heads (warpgroups) of a block, tiles in flight, pieces."""

    heads: int = 2
    stages: int = 3
    segments: int = 1


def states(
    values,
    rows,
    maps,
    initial,
    config: Config,
    *,
    backwards,
    store=False,
    final=True,
    gradient_rows=False,
    interpret=None,
):
    """Walks the chunks of every segment.

    Args:
      values: x, or dy when `backwards`: (b, t, h, 64) bf16, t a multiple of 64 * config.segments.
      rows: (b, t / 64, h, 4, 64) fp32, see `mosaic_sums.decay_rows`.
      maps: B, or C when `backwards`: (b, t, g, n) bf16, n a multiple of 64.
      initial: (b, segments, h, 64, n) fp32 or None for zero.
      config: The layout.
      backwards: Whether time runs backwards.
      store: Whether the state that each chunk starts from is wanted.
      final: Whether the state at the end of each segment is wanted.
      gradient_rows: Whether `rows` are those for the backward kernel.
      interpret: Interpreter parameters, or None for the GPU.

    Returns:
      (b, segments, h, 64, n) fp32, the state at the end of each segment, or None;
      (b, t / 64, h, 64, n) bf16, the state each chunk starts from, or None.
    """
    b, t, h, _ = values.shape
    g, n = maps.shape[2:]
    W, stages = config.heads, config.stages
    count = t // Q // config.segments

    def ssd_states(values_g, rows_g, maps_g, *refs):
        refs = list(refs)
        initial_g = refs.pop(0) if initial is not None else None
        final_g = refs.pop(0) if final else None
        store_g = refs.pop(0) if store else None
        values_s, rows_s, maps_s, full, empty, *store_s = refs
        bi, segment, wg = (lax.axis_index(name) for name in ("b", "s", "wg"))
        group, head_of = tiles.block_heads(lax.axis_index("h"), h, g, W)
        head = head_of(wg)

        def chunk_index(c):
            return segment * count + (count - 1 - c if backwards else c)

        def load(c, slot):
            chunk = chunk_index(c)
            time = pl.ds(chunk * Q, Q)
            plgpu.copy_gmem_to_smem(maps_g.at[bi, time, group], maps_s.at[slot], full.at[slot])
            for w in range(W):
                own = head_of(w)
                sources = [
                    (rows_g.at[bi, chunk, own], rows_s),
                    (values_g.at[bi, time, own], values_s),
                ]
                for source, target in sources:
                    plgpu.copy_gmem_to_smem(source, target.at[slot, w], full.at[slot])

        def chunk(c, slot, S):
            value = plgpu.load(values_s.at[slot, wg].T, layout=MATRIX)
            row = rows_s.at[slot, wg]
            weight = tiles.load_columns(row.at[2 if backwards else 3])
            if gradient_rows and not backwards:
                weight = weight * tiles.load_columns(row.at[1])
            decay = rows_s[slot, wg, 2, Q - 1]
            if store:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                store_s[0].at[wg][...] = S.astype(HALF)
                plgpu.commit_smem()
                target = store_g.at[bi, chunk_index(c), head]
                plgpu.copy_smem_to_gmem(store_s[0].at[wg], target)
            value = (value.astype(FLOAT) * tiles.over_columns(weight, P)).astype(HALF)
            (S,) = tiles.accumulate([(S * decay, value, maps_s.at[slot])], interpret)
            plgpu.commit_smem()  # Ordinary reads of the slot come before its refill.
            return S

        pl.when(wg == 0)(lambda: tiles.fill(count, stages, load))
        S = tiles.zeros(P, n)
        if initial is not None:
            S = plgpu.load(initial_g.at[bi, segment, head], layout=MATRIX, optimized=False)
        S = tiles.run_pipeline(count, chunk, S, stages, load, full, empty, False, wg == 0)
        if final:
            final_g.at[bi, segment, head][...] = S
        plgpu.wait_smem_to_gmem(0)

    scratch = [
        tiles.tile(stages, W, Q, P),
        plgpu.SMEM((stages, W, 4, Q), FLOAT),
        tiles.tile(stages, Q, n),
        plgpu.Barrier(num_arrivals=1 + 2 * W, num_barriers=stages),
        plgpu.Barrier(num_arrivals=W, num_barriers=stages),
        *([tiles.tile(W, P, n)] if store else []),
    ]
    ends = jax.ShapeDtypeStruct((b, config.segments, h, P, n), FLOAT)
    starts = jax.ShapeDtypeStruct((b, t // Q, h, P, n), HALF)
    results = plgpu.kernel(
        ssd_states,
        out_type=[ends] * final + [starts] * store,
        scratch_types=scratch,
        grid=(b, config.segments, tiles.num_blocks(h, g, W)),
        grid_names=("b", "s", "h"),
        num_threads=W,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(values, rows, maps, *(() if initial is None else (initial,)))
    return results[0] if final else None, results[-1] if store else None


def join_segments(local, total, initial, *, backwards):
    """Passes states from segment to segment.

    Args:
      local: (b, s, h, 64, n) fp32. State each segment ends with when it starts from zero.
      total: (b, c, h) fp32. Sum of the log2 decays of each chunk.
      initial: (b, h, 64, n) fp32 or None. State at the start (at the end when `backwards`).
      backwards: Whether the first segment in time comes last.

    Returns:
      (b, s, h, 64, n) fp32, the state each segment starts from.
    """
    b, s, h = local.shape[:3]
    decay = jnp.exp2(total.reshape(b, s, -1, h).sum(2))[..., None, None]
    state = jnp.zeros_like(local[:, 0]) if initial is None else initial
    entering = [None] * s
    for i in reversed(range(s)) if backwards else range(s):
        entering[i] = state
        state = state * decay[:, i] + local[:, i]
    return jnp.stack(entering, axis=1)
