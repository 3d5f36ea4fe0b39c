# SPDX-License-Identifier: Apache-2.0
"""What the SSD kernels for Hopper share: tile sizes, register layouts, products.

All tiles have 64 tokens (`Q`) and 64 channels (`P`): the 64 rows that one warpgroup's tensor core
instruction takes. Larger or smaller heads are brought to 64 channels before a kernel starts.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Tokens in a chunk and channels in a head, as the kernels see them.
Q = P = 64

MATRIX = plgpu.Layout.WGMMA
# Vectors that go down the rows, or along the columns, of a matrix in registers.
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)

FLOAT = jnp.float32
HALF = jnp.bfloat16


def tile(*shape: int) -> plgpu.SMEM:
    """A bf16 buffer in shared memory whose last two axes the tensor cores can read."""
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, HALF, transforms=transforms)


def load_rows(ref) -> jax.Array:
    """Loads a vector that belongs to the rows of a tile."""
    return plgpu.load(ref, layout=ROWS)


def load_columns(ref) -> jax.Array:
    """Loads a vector that belongs to the columns of a tile.

    `optimized` differs from `load_rows` because two equal loads of one vector are merged, and
    then no register layout fits both uses.
    """
    return plgpu.load(ref, layout=COLUMNS, optimized=False)


def over_rows(vector: jax.Array, columns: int) -> jax.Array:
    """Repeats a vector of rows along the columns."""
    return lax.broadcast_in_dim(vector, (vector.shape[0], columns), [0])


def over_columns(vector: jax.Array, rows: int) -> jax.Array:
    """Repeats a vector of columns down the rows."""
    return lax.broadcast_in_dim(vector, (rows, vector.shape[0]), [1])


def zeros(rows: int, columns: int) -> jax.Array:
    """A matrix of zeros in the layout of the accumulators."""
    return plgpu.layout_cast(jnp.zeros((rows, columns), FLOAT), MATRIX)


def token_index(axis: int) -> jax.Array:
    """The row (0) or column (1) of each entry of a Q x Q matrix."""
    return plgpu.broadcasted_iota(jnp.int32, (Q, Q), axis, layout=MATRIX)


def accumulate(products, interpret, first=None) -> list[jax.Array]:
    """Returns acc + lhs @ rhs for every (acc, lhs, rhs), all in flight together.

    lhs is an array in registers or a reference to shared memory, rhs a reference. `first` is
    called with the first result while the others are in flight. The interpreter has neither
    operands in registers nor accumulators with a start value, so it multiplies.
    """
    if interpret is not None:
        results = [acc + _dot(lhs, rhs) for acc, lhs, rhs in products]
        if first is not None:
            first(results[0])
        return results

    def body(refs):
        for ref, (_, lhs, rhs) in zip(refs, products, strict=True):
            plgpu.wgmma(ref, lhs, rhs)
        if first is not None:
            first(plgpu.wgmma_accumulator_load(refs[0], wait_n=len(products) - 1))

    return list(pl.run_state(body)(tuple(plgpu.ACC.init(acc) for acc, _, _ in products)))


def add_product(ref, acc, lhs, rhs, interpret) -> jax.Array | None:
    """Starts ref += lhs @ rhs on the GPU; returns acc + lhs @ rhs in the interpreter."""
    if interpret is not None:
        return acc + _dot(lhs, rhs)
    plgpu.wgmma(ref, lhs, rhs)
    return None


def multiply(products, interpret, use, behind: int = 0):
    """Calls `use(results)` with one function per (shape, lhs, rhs), that waits for its product.

    The products are started together and must be asked for in order; what `use` does before
    asking for one overlaps with it. `behind` products that `use` starts first may stay in flight.
    """
    if interpret is not None:
        return use([lambda lhs=lhs, rhs=rhs: _dot(lhs, rhs) for _, lhs, rhs in products])

    def body(*refs):
        for ref, (_, lhs, rhs) in zip(refs, products, strict=True):
            plgpu.wgmma(ref, lhs, rhs)
        last = len(products) - 1 + behind
        return use(
            [
                lambda ref=ref, left=last - i: plgpu.wgmma_accumulator_load(ref, wait_n=left)
                for i, ref in enumerate(refs)
            ]
        )

    return pl.run_scoped(body, *(plgpu.ACC(shape, FLOAT) for shape, _, _ in products))


def _dot(lhs, rhs) -> jax.Array:
    return jnp.dot(lhs[...], rhs[...], preferred_element_type=FLOAT)


def block_heads(index, heads: int, groups: int, width: int):
    """Which heads a block takes, none of two groups.

    Returns:
      (group, head): the group of block `index`, and a function from a warpgroup's number to its
      head. Where `width` does not divide the heads of a group, the last block's spare warpgroups
      repeat the group's last head: they write the same bytes twice.
    """
    per_group = heads // groups
    blocks = pl.cdiv(per_group, width)
    group = lax.div(index, jnp.int32(blocks))
    first = lax.rem(index, jnp.int32(blocks)) * width

    def head(wg):
        inside = first + wg
        if per_group % width:
            inside = jnp.minimum(inside, per_group - 1)
        return group * per_group + inside

    return group, head


def num_blocks(heads: int, groups: int, width: int) -> int:
    """Blocks of `width` heads that cover every group."""
    return groups * pl.cdiv(heads // groups, width)


def run_pipeline(count, body, first, stages, load, full, empty, producer, is_loader):
    """Runs body(chunk, slot, carry) for `count` chunks whose tiles `load(chunk, slot)` brings.

    Without a producer warpgroup the loading thread refills a slot once every warpgroup has left it.
    """

    def step(c, carry):
        slot = lax.rem(c, jnp.int32(stages))
        plgpu.barrier_wait(full.at[slot])
        carry = body(c, slot, carry)
        if not producer:

            @pl.when(c + stages < count)
            def _():
                plgpu.barrier_arrive(empty.at[slot])

                @pl.when(is_loader)
                def _():
                    plgpu.barrier_wait(empty.at[slot])
                    load(c + stages, slot)

        return carry

    return lax.fori_loop(0, count, step, first)


def release(c, slot, count, stages, empty):
    """Tells the producer that this warpgroup has read all of a slot."""

    @pl.when(c + stages < count)
    def _():
        plgpu.barrier_arrive(empty.at[slot])


def fill(count, stages, load):
    """Loads the first chunks, one into each slot."""
    for c in range(min(stages, count)):
        load(jnp.int32(c), c)


def produce(count, stages, load, empty, registers):
    """The producer warpgroup: keeps every slot filled."""
    plgpu.set_max_registers(registers, action="decrease")
    fill(count, stages, load)

    def step(c, _):
        slot = lax.rem(c, jnp.int32(stages))
        plgpu.barrier_wait(empty.at[slot])
        load(c, slot)

    lax.fori_loop(min(stages, count), count, step, None)
