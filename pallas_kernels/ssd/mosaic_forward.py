# SPDX-License-Identifier: Apache-2.0
"""SSD forward for Hopper: one warpgroup walks the chunks of one head, its state in registers.

Everything is held transposed, channels down the rows and tokens along the columns, so that the
state and x go from registers straight into the tensor cores. Per chunk, with p the cumulative sums
of the log2 decays, L[j, i] = 2^(p_i - p_j) * step_j for j <= i, and S the incoming state:

    G = B C'           y = (S C') * 2^p + D * x + x (G * L)           S = S * 2^p_last + (x * w) B

Only G * L and y pass through shared memory. The warpgroups of a block take neighbouring heads of
one group and share its B and C.
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
    """How the forward kernel is laid out.

    Attributes:
      heads: Heads, that is compute warpgroups, of a block.
      producer: Whether one more warpgroup does the loading.
      together: Whether the two products of the state and of B C' are in flight together (more
        registers) or one after the other.
      stages: Chunks whose tiles are in shared memory at once.
      segments: Pieces the sequence is cut into, each with a block of its own.
    """

    heads: int = 2
    producer: bool = True
    together: bool = True
    stages: int = 2
    segments: int = 1


# Registers per thread of compute and producer warpgroups, by number of compute warpgroups: the sum
# over all warpgroups may not exceed what the launch gives them.
REGISTERS = {1: (232, 24), 2: (240, 24), 3: (160, 32)}


def forward(x, rows, B, C, D, z, initial, config: Config, *, ungated=False, interpret=None):
    """Runs the scan.

    Args:
      x: (b, t, h, 64) bf16, t a multiple of 64 * config.segments.
      rows: (b, t / 64, h, 4, 64) fp32, see `mosaic_sums.decay_rows`.
      B, C: (b, t, g, n) bf16, n a multiple of 64.
      D: (h, 64) fp32 or None. z: as x or None.
      initial: (b, segments, h, 64, n) fp32 or None for zero. State entering each segment.
      config: The layout.
      ungated: Whether y before the gate is wanted too.
      interpret: Interpreter parameters, or None for the GPU.

    Returns:
      y (b, t, h, 64) bf16; y before the gate, or None; (b, segments, h, 64, n) fp32, the state
      leaving each segment.
    """
    b, t, h, _ = x.shape
    g, n = B.shape[2:]
    W, stages = config.heads, config.stages
    count = t // Q // config.segments
    outputs = 1 + (ungated and z is not None)
    names = [k for k, v in (("D", D), ("z", z), ("initial", initial)) if v is not None]

    def ssd_forward(x_g, rows_g, B_g, C_g, *refs):
        optional = dict(zip(names, refs, strict=False))
        y_g, *ungated_g, final_g = refs[len(names) : len(names) + outputs + 1]
        x_s, rows_s, B_s, C_s, m_s, y_s, *z_s, full, empty = refs[len(names) + outputs + 1 :]
        bi, segment, wg = (lax.axis_index(name) for name in ("b", "s", "wg"))
        group, head_of = tiles.block_heads(lax.axis_index("h"), h, g, W)
        head = head_of(wg)

        def load(c, slot):
            chunk = segment * count + c
            time = pl.ds(chunk * Q, Q)
            plgpu.copy_gmem_to_smem(C_g.at[bi, time, group], C_s.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(B_g.at[bi, time, group], B_s.at[slot], full.at[slot])
            for w in range(W):
                own = head_of(w)
                sources = [(rows_g.at[bi, chunk, own], rows_s), (x_g.at[bi, time, own], x_s)]
                if z_s:
                    sources.append((optional["z"].at[bi, time, own], z_s[0]))
                for source, target in sources:
                    plgpu.copy_gmem_to_smem(source, target.at[slot, w], full.at[slot])

        def decayed_products(slot, S):
            """Puts G * L into shared memory; returns x and (S C') * 2^p + D * x."""
            x_ref, row = x_s.at[slot, wg].T, rows_s.at[slot, wg]

            def put(g):
                later = tiles.over_columns(tiles.load_columns(row.at[0]), Q)
                exponent = later - tiles.over_rows(tiles.load_rows(row.at[1]), Q)
                causal = tiles.token_index(1) >= tiles.token_index(0)
                decay = jnp.exp2(jnp.where(causal, exponent, -jnp.inf))
                m_s.at[wg][...] = (g() * decay).astype(HALF)

            def carried(y):
                x = plgpu.load(x_ref, layout=MATRIX)
                y = y() * tiles.over_columns(tiles.load_columns(row.at[2]), P)
                if skip is not None:
                    y = y + tiles.over_rows(skip, Q) * x.astype(FLOAT)
                return x, y

            inner = ((Q, Q), B_s.at[slot], C_s.at[slot].T)
            outer = ((P, Q), S.astype(HALF), C_s.at[slot].T)
            if config.together:

                def use(results):
                    put(results[0])
                    return carried(results[1])

                return tiles.multiply([inner, outer], interpret, use)
            tiles.multiply([inner], interpret, lambda results: put(results[0]))
            return tiles.multiply([outer], interpret, lambda results: carried(results[0]))

        def chunk(c, slot, S):
            x, y = decayed_products(slot, S)
            row = rows_s.at[slot, wg]
            weight = tiles.over_columns(tiles.load_columns(row.at[3]), P)
            weighted = (x.astype(FLOAT) * weight).astype(HALF)
            S = S * rows_s[slot, wg, 2, Q - 1]
            gate = None
            if z_s:
                gate = plgpu.load(z_s[0].at[slot, wg].T, layout=MATRIX)
            plgpu.commit_smem()
            products = [(y, x, m_s.at[wg]), (S, weighted, B_s.at[slot])]
            y, S = tiles.accumulate(products, interpret)
            if interpret is not None:
                plgpu.commit_smem()  # The interpreter multiplies with ordinary loads.
            if config.producer:
                tiles.release(c, slot, count, stages, empty)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if ungated_g:
                y_s.at[1, wg].T[...] = y.astype(HALF)
            if gate is not None:
                gate = gate.astype(FLOAT)
                y = y * gate / (1.0 + jnp.exp2(gate * -1.4426950408889634))
            y_s.at[0, wg].T[...] = y.astype(HALF)
            plgpu.commit_smem()
            time = pl.ds((segment * count + c) * Q, Q)
            for i, target in enumerate([y_g, *ungated_g]):
                plgpu.copy_smem_to_gmem(y_s.at[i, wg], target.at[bi, time, head])
            return S

        skip = None

        def compute():
            nonlocal skip
            if config.producer:
                plgpu.set_max_registers(REGISTERS[W][0], action="increase")
            if D is not None:
                skip = plgpu.load(optional["D"].at[head], layout=tiles.ROWS, optimized=False)
            S = tiles.zeros(P, n)
            if initial is not None:
                source = optional["initial"].at[bi, segment, head]
                S = plgpu.load(source, layout=MATRIX, optimized=False)
            S = tiles.run_pipeline(
                count, chunk, S, stages, load, full, empty, config.producer, wg == 0
            )
            final_g.at[bi, segment, head][...] = S
            plgpu.wait_smem_to_gmem(0)

        if config.producer:
            pl.when(wg < W)(compute)
            produce = lambda: tiles.produce(count, stages, load, empty, REGISTERS[W][1])  # noqa: E731
            pl.when(wg == W)(produce)
        else:
            pl.when(wg == 0)(lambda: tiles.fill(count, stages, load))
            compute()

    loads = 2 + W * (2 + (z is not None))
    scratch = [
        tiles.tile(stages, W, Q, P),
        plgpu.SMEM((stages, W, 4, Q), FLOAT),
        tiles.tile(stages, Q, n),
        tiles.tile(stages, Q, n),
        tiles.tile(W, Q, Q),
        tiles.tile(outputs, W, Q, P),
        *([tiles.tile(stages, W, Q, P)] if z is not None else []),
        plgpu.Barrier(num_arrivals=loads, num_barriers=stages),
        plgpu.Barrier(num_arrivals=W, num_barriers=stages),
    ]
    like_x = jax.ShapeDtypeStruct(x.shape, HALF)
    states = jax.ShapeDtypeStruct((b, config.segments, h, P, n), FLOAT)
    y, *rest, final = plgpu.kernel(
        ssd_forward,
        out_type=[like_x] * outputs + [states],
        scratch_types=scratch,
        grid=(b, config.segments, tiles.num_blocks(h, g, W)),
        grid_names=("b", "s", "h"),
        num_threads=W + config.producer,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(x, rows, B, C, *(v for v in (D, z, initial) if v is not None))
    return y, rest[0] if rest else None, final
