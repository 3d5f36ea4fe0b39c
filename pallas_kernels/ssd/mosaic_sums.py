# SPDX-License-Identifier: Apache-2.0
"""Cumulative sums over the 64 tokens of a chunk, and what the SSD kernels need of them.

A cumulative sum is a product with a triangle of ones. In three bf16 parts, that together are the
fp32 number, the tensor cores add it up exactly as fp32 would. Each warpgroup takes 64 rows, that
is chunks and heads in any order, straight from and to device memory: these kernels move a few
bytes per token and replace chains of small XLA kernels.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ssd import mosaic_tiles as tiles
from pallas_kernels.ssd.mosaic_tiles import FLOAT, HALF, MATRIX, Q

# Rows of chunks and heads that one warpgroup takes.
ROWS_PER_BLOCK = 64


def decay_rows(step, decay, *, for_backward: bool, interpret=None):
    """What the scan kernels read, from steps and log2 decays.

    With p the cumulative sums of `decay` and w = 2^(p_last - p):
    forward p, p - log2(step), 2^p, step * w; backward p, step, 2^p, w.

    Args:
      step, decay: (b, c, h, 64) fp32.
      for_backward: Which rows.
      interpret: Interpreter parameters, or None for the GPU.

    Returns:
      (b, c, h, 4, 64) fp32.
    """

    def ssd_rows(step_g, decay_g, rows_g, ones_s):
        rows = _first_row(step_g)
        decay = _load(decay_g, rows)
        _put_triangle(ones_s, "through")
        p = _sums(decay, ones_s, interpret)
        w = jnp.exp2(tiles.over_rows(jnp.sum(decay, axis=1), Q) - p)
        step = _load(step_g, rows)
        second, last = (step, w) if for_backward else (p - jnp.log2(step), step * w)
        for i, values in enumerate((p, second, jnp.exp2(p), last)):
            rows_g.at[rows, pl.ds(i * Q, Q)][...] = values

    (out,) = _run(ssd_rows, [step, decay], [4 * Q], 1, interpret)
    return out.reshape(*step.shape[:-1], 4, Q)


def pair_sums(later, leaving, *, interpret=None):
    """At token k, the sum of `later` from k on plus that of `leaving` before k; (b, c, h, 64)."""

    def ssd_pair_sums(later_g, leaving_g, out_g, from_s, before_s):
        rows = _first_row(later_g)
        later = _load(later_g, rows)
        leaving = _load(leaving_g, rows)
        _put_triangle(from_s, "from")
        _put_triangle(before_s, "before")
        total = _sums(later, from_s, interpret) + _sums(leaving, before_s, interpret)
        out_g.at[rows][...] = total

    (out,) = _run(ssd_pair_sums, [later, leaving], [Q], 2, interpret)
    return out.reshape(later.shape)


def _run(body, inputs, widths, triangles, interpret):
    count = inputs[0].size // Q
    padded = max(count, ROWS_PER_BLOCK)
    flat = [values.reshape(count, Q) for values in inputs]
    if padded != count:
        flat = [jnp.pad(values, ((0, padded - count), (0, 0))) for values in flat]
    outputs = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((padded, width), FLOAT) for width in widths],
        scratch_types=[tiles.tile(Q, Q) for _ in range(triangles)],
        grid=(pl.cdiv(padded, ROWS_PER_BLOCK),),
        grid_names=("rows",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*flat)
    return [values[:count] for values in outputs]


def _first_row(ref):
    """This block's rows; the last block steps back to whole rows and repeats some."""
    first = lax.axis_index("rows") * ROWS_PER_BLOCK
    return pl.ds(jnp.minimum(first, ref.shape[0] - ROWS_PER_BLOCK), ROWS_PER_BLOCK)


def _load(ref, rows):
    return plgpu.load(ref.at[rows], layout=MATRIX, optimized=False)


def _put_triangle(ref, kind: str) -> None:
    """Ones where the source token (row) counts for the target token (column)."""
    source, target = tiles.token_index(0), tiles.token_index(1)
    counts = {
        "through": source <= target,
        "from": source >= target,
        "before": source < target,
    }[kind]
    ref[...] = jnp.where(counts, 1.0, 0.0).astype(HALF)
    plgpu.commit_smem()


def _sums(values, ones, interpret):
    """values @ ones, the values in three parts of 8 bits each."""
    total = tiles.zeros(ROWS_PER_BLOCK, Q)
    for _ in range(3):
        part = values.astype(HALF)
        values = values - part.astype(FLOAT)
        (total,) = tiles.accumulate([(total, part, ones)], interpret)
    return total
