# SPDX-License-Identifier: Apache-2.0
"""What the Mosaic GPU kernels of `selective_scan` share: a lane's arithmetic and the tiles' shapes.

One warpgroup owns `CHANNELS` neighbouring channels, one per lane; the n states of a channel are n
registers of its lane. Every value below is a vector over the lanes. Times are cut into tiles of
`TILE` tokens, the unit of a copy to shared memory, and tiles into groups of `GROUP` tokens whose
loads are all issued before any store, since the compiler moves no load above a store.

Per tile and group of channels there is one row of `2 n (+ 4)` float32 a token: B, C and, where the
call has padding or documents, [restart, real, 0, 0] with restart 0 or `RESTART` (added to the
exponent of the decays: it forgets everything) and real 1 or 0.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

CHANNELS = 128
TILE = 16
GROUP = 4
RESTART = -1e30
LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
# log(1 + u) / u for u in [0, 1], a polynomial right to 3e-8; lowest power first.
_LOG1P = (
    1.0, -0.49999502, 0.33319271, -0.24844369, 0.19111431, -0.1367477, 0.07836167, -0.02958851,
    0.00525346,
)  # fmt: skip
# The same to 2e-6, for arguments that were rounded to bf16.
_LOG1P_ROUGH = (
    0.99999875, -0.49987191, 0.33112052, -0.23514864, 0.14943458, -0.06658805, 0.01420283,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes of one launch; every array is already padded to them.

    Attributes:
      b, t, e, n: As in `selective_scan`; t a multiple of TILE, e of CHANNELS.
      blocks_per_group: Blocks of channels that share a group's B and C.
      segments: Pieces the sequence is cut into, all worked on at once.
      has_z, softplus, has_flags: Which optional parts the call has.
      rough: Whether inputs and outputs are bf16, so that softplus and gate may be right to 2e-4.
    """

    b: int
    t: int
    e: int
    n: int
    blocks_per_group: int
    segments: int
    has_z: bool
    softplus: bool
    has_flags: bool
    rough: bool

    @property
    def blocks(self) -> int:
        return self.e // CHANNELS

    @property
    def tiles(self) -> int:
        return self.t // TILE

    @property
    def tiles_per_segment(self) -> int:
        return -(-self.tiles // self.segments)

    @property
    def row(self) -> int:
        """Numbers a token has in the array of B, C and flags."""
        return 2 * self.n + (4 if self.has_flags else 0)

    @property
    def grid(self) -> tuple[int, int, int]:
        return (self.blocks, self.segments, self.b)


GRID_NAMES = ("block", "segment", "row")


def lanes() -> plgpu.Layout:
    """The layout of a vector with one channel per lane."""
    return plgpu.Layout.WG_STRIDED((CHANNELS,), vec_size=1)


def load(ref) -> jax.Array:
    """Loads a vector over the lanes, as float32."""
    return plgpu.load(ref, layout=lanes()).astype(jnp.float32)


def full(value: float) -> jax.Array:
    """A vector over the lanes with one value."""
    return plgpu.layout_cast(jnp.full((CHANNELS,), value, jnp.float32), lanes())


def store_sums(ref, sums: jax.Array) -> None:
    """Stores sums over the lanes, which several lanes hold, to device memory."""
    # JAX 0.12 stores whole sectors only, unless told otherwise; 0.11 has no way to be told.
    if hasattr(plgpu, "store"):
        plgpu.store(ref, sums, optimized=False)
    else:
        ref[...] = sums


def softplus(v: jax.Array, plan: "Plan") -> jax.Array:
    """log(1 + exp(v)), accurate in relative terms also where it is small."""
    u = jnp.exp2(jnp.abs(v) * -LOG2E)
    return jnp.maximum(v, 0.0) + u * _horner(u, _LOG1P_ROUGH if plan.rough else _LOG1P)


def softplus_slope(step: jax.Array, plan: "Plan") -> jax.Array:
    """Derivative of softplus where its value is `step`: 1 - exp(-step)."""
    direct = 1.0 - jnp.exp2(step * -LOG2E)
    if plan.rough:
        return direct
    series = step * (1.0 + step * (-1 / 2 + step * (1 / 6 + step * (-1 / 24 + step * (1 / 120)))))
    return jnp.where(step < 0.125, series, direct)


def sigmoid(v: jax.Array, plan: "Plan") -> jax.Array:
    """1 / (1 + exp(-v)); to about 2e-4 by the hardware's tanh where values are rounded to bf16."""
    if plan.rough:
        return 0.5 + 0.5 * jnp.tanh(0.5 * v)
    return 1.0 / (1.0 + jnp.exp2(jnp.minimum(v * -LOG2E, 126.0)))


def step_size(dt: jax.Array, bias: jax.Array, plan: Plan, real: jax.Array | None) -> jax.Array:
    """The step of a token: dt + dt_bias, through softplus if asked, and 0 for padding."""
    step = dt + bias
    step = softplus(step, plan) if plan.softplus else step
    return step if real is None else step * real


def decay(step: jax.Array, rate: jax.Array, restart: jax.Array | None) -> jax.Array:
    """exp(step * A), with rate = A * log2(e); 0 where a document starts."""
    return jnp.exp2(step * rate if restart is None else step * rate + restart)


def _horner(x: jax.Array, coefficients: tuple[float, ...]) -> jax.Array:
    value = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value


def flags(rows_s, slot, token, plan: Plan) -> tuple[jax.Array | None, jax.Array | None]:
    """(restart, real) of a token, scalars; None where the call has neither."""
    if not plan.has_flags:
        return None, None
    return rows_s[slot, token, 2 * plan.n], rows_s[slot, token, 2 * plan.n + 1]


def block_indices() -> tuple[jax.Array, jax.Array, jax.Array]:
    """(row of the batch, block of channels, segment) of this program."""
    return lax.axis_index("row"), lax.axis_index("block"), lax.axis_index("segment")


def synchronize(interpret) -> None:
    """Waits for all lanes of the warpgroup; what they wrote to shared memory is seen by all."""
    if interpret is not None:
        # The interpreter has no plain barrier; this one also orders the copy engine.
        plgpu.commit_smem()
        return
    plgpu.inline_mgpu()(lambda ctx: mgpu_utils.warpgroup_barrier())()


def compiler_params() -> plgpu.CompilerParams:
    """How these kernels are compiled."""
    # Without the automatic barriers (two per token): a lane reads and writes shared memory of its
    # own channel only, and whatever crosses lanes stands behind an explicit commit.
    # Lane semantics take the layouts as written here; the other kind's search for layouts grows
    # with the square of the unrolled code (minutes for the backward kernel) and finds the same.
    return plgpu.CompilerParams(
        approx_math=True,
        unsafe_no_auto_barriers=True,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
    )
