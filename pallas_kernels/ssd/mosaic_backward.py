# SPDX-License-Identifier: Apache-2.0
"""SSD backward for Hopper: all chunks at once, each block looping over heads of a group.

The block of a chunk holds B and C and sums their gradients over its heads in registers, in order,
so that they leave the chip once. The states that enter the chunk (S, from the past) and their
gradients (R, from the future) come from `mosaic_states.py`. With dy the gradient of y,
L[j, i] = 2^(p_i - p_j) for j <= i, e = 2^p, w = 2^(p_last - p):

    u_j  = w_j R B_j + sum_i (B_j . C_i) L[j, i] dy_i      dx_j = step_j u_j + D dy_j
    dB_j = sum_heads step_j w_j x_j R + (dG' C)_j          dC_i = sum_heads e_i dy_i S + (dG B)_i
    dG   = sum_heads L[j, i] step_j (dy_i . x_j)

Two warpgroups share a head: one holds B's side (tokens j down the rows), one C's side (tokens i).
The decays' gradient is a difference of sums over rows and columns of one matrix. Its rows are
summed on C's side and its columns are step_j x_j . u_j on B's, where the products with the same
bf16 factors come from the tensor cores: both are the same numbers up to fp32 rounding, and what
cancels, cancels.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ssd import mosaic_tiles as tiles
from pallas_kernels.ssd.mosaic_tiles import COLUMNS, FLOAT, HALF, MATRIX, P, Q

# Rows of the sums that the kernel returns, see `backward`.
X_U, X_R_B, DECAY_ROWS, X_DY, S_R_0, S_R_1 = range(6)
REGISTERS = (240, 24)


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is laid out.

    Attributes:
      splits: Blocks that share the heads of a group; it divides h / g.
      stages: Heads whose tiles are in shared memory at once.
      early: Whether the product into dC starts before C's side works on dy x', to overlap with it
        at the price of registers.
    """

    splits: int = 1
    stages: int = 2
    early: bool = False


def backward(x, dy, rows, B, C, D, S, R, config: Config, *, interpret=None):
    """Gradients of everything inside the chunks.

    Args:
      x, dy: (b, t, h, 64) bf16, t a multiple of 64.
      rows: (b, t / 64, h, 4, 64) fp32, see `mosaic_sums.decay_rows`.
      B, C: (b, t, g, n) bf16, n a multiple of 64.
      D: (h, 64) fp32 or None.
      S, R: (b, t / 64, h, 64, n) bf16. State entering each chunk; gradient of the state leaving it.
      config: The layout.
      interpret: Interpreter parameters, or None for the GPU.

    Returns:
      dx (b, t, h, 64) bf16; dB and dC (b, t, g * config.splits, n), to be summed
      over splits, bf16 where there is one, else fp32;
      sums (b, t / 64, h, 6, 64) fp32, per token: x . u; w step x . R B; the row sums of the decays'
      gradient; x . dy; and, per channel, two halves of S . R.
    """
    b, t, h, _ = x.shape
    g, n = B.shape[2:]
    count = h // g // config.splits
    stages = config.stages
    split = 64 * pl.cdiv(n, 128)

    def ssd_backward(x_g, dy_g, rows_g, B_g, C_g, S_g, R_g, *refs):
        refs = list(refs)
        D_g = refs.pop(0) if D is not None else None
        dx_g, dB_g, dC_g, sums_g = refs[:4]
        (
            x_s,
            dy_s,
            rows_s,
            S_s,
            R_s,
            B_s,
            C_s,
            dx_s,
            dG_s,
            full,
            empty,
            maps_ready,
            dG_ready,
            *D_s,
        ) = refs[4:]
        bi, chunk, part, wg = (lax.axis_index(name) for name in ("b", "c", "part", "wg"))
        group = lax.div(part, jnp.int32(config.splits))
        time = pl.ds(chunk * Q, Q)

        def load(i, slot):
            head = part * count + i
            sources = [
                (x_g.at[bi, time, head], x_s),
                (dy_g.at[bi, time, head], dy_s),
                (rows_g.at[bi, chunk, head], rows_s),
                (S_g.at[bi, chunk, head], S_s),
                (R_g.at[bi, chunk, head], R_s),
            ]
            if D is not None:
                sources.append((D_g.at[head], D_s[0]))
            for source, target in sources:
                plgpu.copy_gmem_to_smem(source, target.at[slot], full.at[slot])

        def save(i, row, values):
            sums_g.at[bi, chunk, part * count + i, row][...] = values

        def load_dy(slot):
            return plgpu.load(dy_s.at[slot], layout=MATRIX).astype(FLOAT)

        def state_product(slot, half):
            """S . R over one half of n; where n has no two tiles the first half is all of it."""
            columns = pl.ds(0, split) if half == 0 else pl.ds(split, n - split)
            if columns.size == 0:
                return plgpu.layout_cast(jnp.zeros((P,), FLOAT), tiles.ROWS)
            S = plgpu.load(S_s.at[slot, :, columns], layout=MATRIX).astype(FLOAT)
            R = plgpu.load(R_s.at[slot, :, columns], layout=MATRIX).astype(FLOAT)
            return jnp.sum(S * R, axis=1)

        def decays(row, rows_axis, causal):
            """L with the tokens of `rows_axis` down the rows; the row of p serves both axes."""
            down = tiles.over_rows(tiles.load_rows(row.at[0]), Q)
            along = tiles.over_columns(tiles.load_columns(row.at[0]), Q)
            exponent = along - down if rows_axis == "j" else down - along
            return jnp.exp2(jnp.where(causal, exponent, -jnp.inf))

        def side_of_B():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            plgpu.barrier_wait(maps_ready)
            G = tiles.multiply([((Q, Q), B_s, C_s.T)], interpret, lambda results: results[0]())

            def head(i, slot, dB):
                row = rows_s.at[slot]
                step = tiles.load_rows(row.at[1])
                w = tiles.load_rows(row.at[3])

                def use(results):
                    causal = tiles.token_index(1) >= tiles.token_index(0)
                    M = (G * decays(row, "j", causal)).astype(HALF)
                    x = plgpu.load(x_s.at[slot], layout=MATRIX)
                    return M, x, results[0]() * tiles.over_rows(w, P)

                M, x, u = tiles.multiply([((Q, P), B_s, R_s.at[slot].T)], interpret, use)
                wide = x.astype(FLOAT)
                leaving = jnp.sum(wide * u, axis=1) * step
                weighted = (wide * tiles.over_rows(w * step, P)).astype(HALF)

                def finish(u):
                    dx = u * tiles.over_rows(step, P)
                    if D is not None:
                        skip = plgpu.load(D_s[0].at[slot], layout=COLUMNS, optimized=False)
                        dx = dx + tiles.over_columns(skip, Q) * load_dy(slot)
                    x_u = jnp.sum(x.astype(FLOAT) * u, axis=1)
                    through = state_product(slot, 0)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    dx_s[...] = dx.astype(HALF)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(dx_s, dx_g.at[bi, time, part * count + i])
                    # Stores to the device memory would hold up the fence in `commit_smem`.
                    save(i, X_U, x_u)
                    save(i, X_R_B, leaving)
                    save(i, S_R_0, through)

                products = [(u, M, dy_s.at[slot]), (dB, weighted, R_s.at[slot])]
                _, dB = tiles.accumulate(products, interpret, finish)
                tiles.release(i, slot, count, stages, empty)
                return dB

            dB = tiles.run_pipeline(
                count, head, tiles.zeros(Q, n), stages, load, full, empty, True, False
            )
            plgpu.barrier_wait(dG_ready)
            (dB,) = tiles.accumulate([(dB, dG_s.T, C_s)], interpret)
            dB_g.at[bi, time, part][...] = dB.astype(dB_g.dtype)
            plgpu.wait_smem_to_gmem(0)

        def side_of_C():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            plgpu.barrier_wait(maps_ready)
            G = tiles.multiply([((Q, Q), C_s, B_s.T)], interpret, lambda results: results[0]())

            def head(dC_ref, i, slot, sums):
                dC, dG = sums
                row = rows_s.at[slot]
                e = tiles.load_rows(row.at[2])

                def add_to_dC(dy):
                    weighted = (dy * tiles.over_rows(e, P)).astype(HALF)
                    return tiles.add_product(dC_ref, dC, weighted, S_s.at[slot], interpret)

                def inside(results):
                    dC_new = add_to_dC(load_dy(slot)) if config.early else None
                    at, from_ = tiles.token_index(0), tiles.token_index(1)
                    L = decays(row, "i", at >= from_)
                    K = results[0]()
                    diagonal = jnp.sum(jnp.where(at == from_, K, 0.0), axis=1)
                    K = K * tiles.over_columns(tiles.load_columns(row.at[1]), Q)
                    own = jnp.sum(K * _round_to_bf16(G * L), axis=1)
                    return dC_new, dG + K * L, diagonal, own

                def carried(results):
                    through = state_product(slot, 1)
                    dy = load_dy(slot)
                    from_before = jnp.sum(dy * results[0](), axis=1) * e
                    return dC_new if config.early else add_to_dC(dy), from_before, through

                # One after the other: both products at once would not fit the registers.
                K = ((Q, Q), dy_s.at[slot], x_s.at[slot].T)
                dC_new, dG, diagonal, own = tiles.multiply(
                    [K], interpret, inside, behind=int(config.early)
                )
                C_S = ((Q, P), C_s, S_s.at[slot].T)
                dC_new, from_before, through = tiles.multiply([C_S], interpret, carried)
                saved = diagonal, own + from_before, through
                plgpu.commit_smem()  # Ordinary reads of the slot come before its refill.
                for kind, values in zip((X_DY, DECAY_ROWS, S_R_1), saved, strict=True):
                    save(i, kind, values)
                if interpret is None and not config.early:
                    plgpu.wgmma_wait(0)
                tiles.release(i, slot, count, stages, empty)
                return dC_new, dG

            def walk(dC_ref=None):
                dC = tiles.zeros(Q, n) if dC_ref is None else None
                body = functools.partial(head, dC_ref)
                first = (dC, tiles.zeros(Q, Q))
                dC, dG = tiles.run_pipeline(
                    count, body, first, stages, load, full, empty, True, False
                )
                dG = dG.astype(HALF)
                dG_s[...] = dG
                plgpu.commit_smem()
                plgpu.barrier_arrive(dG_ready)
                dC = tiles.add_product(dC_ref, dC, dG, B_s, interpret)
                dC = dC if dC_ref is None else dC_ref[...]
                dC_g.at[bi, time, part][...] = dC.astype(dC_g.dtype)

            if interpret is None:
                pl.run_scoped(walk, plgpu.ACC((Q, n), FLOAT))
            else:
                walk()

        def produce():
            plgpu.copy_gmem_to_smem(B_g.at[bi, time, group], B_s, maps_ready)
            plgpu.copy_gmem_to_smem(C_g.at[bi, time, group], C_s, maps_ready)
            tiles.produce(count, stages, load, empty, REGISTERS[1])

        pl.when(wg == 0)(side_of_B)
        pl.when(wg == 1)(side_of_C)
        pl.when(wg == 2)(produce)

    scratch = [
        tiles.tile(stages, Q, P),
        tiles.tile(stages, Q, P),
        plgpu.SMEM((stages, 4, Q), FLOAT),
        tiles.tile(stages, P, n),
        tiles.tile(stages, P, n),
        tiles.tile(Q, n),
        tiles.tile(Q, n),
        tiles.tile(Q, P),
        tiles.tile(Q, Q),
        plgpu.Barrier(num_arrivals=5 + (D is not None), num_barriers=stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=1),
        plgpu.Barrier(num_arrivals=1, num_barriers=1),
        *([plgpu.SMEM((stages, P), FLOAT)] if D is not None else []),
    ]
    # Partial sums over heads stay in fp32.
    maps_dtype = HALF if config.splits == 1 else FLOAT
    maps = jax.ShapeDtypeStruct((b, t, g * config.splits, n), maps_dtype)
    sums = jax.ShapeDtypeStruct((b, t // Q, h, 6, Q), FLOAT)
    return plgpu.kernel(
        ssd_backward,
        out_type=[jax.ShapeDtypeStruct(x.shape, HALF), maps, maps, sums],
        scratch_types=scratch,
        grid=(b, t // Q, g * config.splits),
        grid_names=("b", "c", "part"),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(x, dy, rows, B, C, S, R, *(() if D is None else (D,)))


def _round_to_bf16(values):
    """Rounds fp32 to the 8 digits of bf16 without leaving fp32.

    The conversion there and back runs at an eighth of the rate of these operations. The factor is
    a power of two so that nothing changes when the compiler fuses it into the subtractions.
    """
    spread = values * 2.0**16
    return spread - (spread - values)
