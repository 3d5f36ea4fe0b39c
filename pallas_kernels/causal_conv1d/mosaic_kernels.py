# SPDX-License-Identifier: Apache-2.0
"""The two kernels of `causal_conv1d` in Mosaic GPU.

A warpgroup owns a block of channels, two a lane where they are in pairs, and walks `STRETCH` tokens
in tiles of `TILE` that the copy engine brings to shared memory; the last w-1 tokens stay in
registers. The backward kernel computes pre = the value before the activation again, walks in the
same direction, and keeps the sums of the last w-1 rows of dx, which are complete w-1 tokens later.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

TILE = 16
STRETCH = 128
LANES = 128
_FORWARD_STAGES, _BACKWARD_STAGES = 4, 3
_GRID_NAMES = ("block", "stretch", "row")
_LOG2E = 1.4426950408889634


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes of one launch.

    Attributes:
      b, t, e, w: As in `causal_conv1d`; t a multiple of TILE, e of `LANES`.
      silu: Whether the activation is silu.
      has_state: Whether there is an initial state.
      rough: Whether x is bf16, so that silu may be right to 2e-4.
    """

    b: int
    t: int
    e: int
    w: int
    silu: bool
    has_state: bool
    rough: bool

    @property
    def channels(self) -> int:
        """Channels of a block: two a lane, 32 bits of bf16, where that divides them."""
        return 2 * LANES if self.rough and self.e % (2 * LANES) == 0 else LANES

    @property
    def stretches(self) -> int:
        return -(-self.t // STRETCH)

    @property
    def grid(self) -> tuple[int, int, int]:
        return (self.e // self.channels, self.stretches, self.b)

    def full(self, value: float) -> jax.Array:
        """A block's vector with one value."""
        layout = plgpu.Layout.WG_STRIDED((self.channels,), vec_size=self.channels // LANES)
        return plgpu.layout_cast(jnp.full((self.channels,), value, jnp.float32), layout)

    def load(self, ref) -> jax.Array:
        """Loads a block's vector as float32."""
        layout = plgpu.Layout.WG_STRIDED((self.channels,), vec_size=self.channels // LANES)
        return plgpu.load(ref, layout=layout).astype(jnp.float32)


def forward(
    x: Float[Array, "b t e"],
    taps: Float[Array, "w+1 e"],
    state: Float[Array, "b w-1 e"] | None,
    plan: Plan,
    *,
    interpret=None,
) -> Float[Array, "b t e"]:
    """Returns y. The last row of `taps` is the bias."""

    def body(*refs):
        x_g, taps_g, *state_g, y_g, x_s, before_s, y_s, full, early = refs
        row, channels, first, count = _place(plan)
        kept = plan.w - 1

        def fetch(i, slot):
            source = x_g.at[row, pl.ds((first + i) * TILE, TILE), channels]
            plgpu.copy_gmem_to_smem(source, x_s.at[slot], full.at[slot])

        _fetch_before(x_g, before_s, early, row, channels, first, plan)
        for stage in range(_FORWARD_STAGES):
            pl.when(stage < count)(lambda stage=stage: fetch(stage, stage))
        weights = [plan.load(taps_g.at[j, channels]) for j in range(plan.w)]
        bias = plan.load(taps_g.at[plan.w, channels])
        window = _before(before_s, early, state_g, row, channels, first, plan)

        def tile(i, window):
            slot = lax.rem(i, jnp.int32(_FORWARD_STAGES))
            out = lax.rem(i, jnp.int32(2))
            plgpu.barrier_wait(full.at[slot])
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            rows = [*window, *(plan.load(x_s.at[slot, u]) for u in range(TILE))]
            for u in range(TILE):
                pre = _before_activation(rows[u : u + plan.w], weights, bias)
                y_s[out, u] = (pre * _sigmoid(pre, plan) if plan.silu else pre).astype(y_s.dtype)
            plgpu.commit_smem()
            times = pl.ds((first + i) * TILE, TILE)
            plgpu.copy_smem_to_gmem(y_s.at[out], y_g.at[row, times, channels])
            pl.when(i + _FORWARD_STAGES < count)(lambda: fetch(i + _FORWARD_STAGES, slot))
            return tuple(rows[len(rows) - kept :])

        lax.fori_loop(0, count, tile, tuple(window))
        plgpu.wait_smem_to_gmem(0)

    block = (TILE, plan.channels)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[
            plgpu.SMEM((_FORWARD_STAGES, *block), x.dtype),
            plgpu.SMEM((plan.w - 1, plan.channels), x.dtype),
            plgpu.SMEM((2, *block), x.dtype),
            plgpu.Barrier(num_barriers=_FORWARD_STAGES),
            plgpu.Barrier(),
        ],
        grid=plan.grid,
        grid_names=_GRID_NAMES,
        compiler_params=_compiler_params(),
        interpret=interpret,
    )(x, taps, *_present(state))


def backward(
    x: Float[Array, "b t e"],
    dy: Float[Array, "b t e"],
    taps: Float[Array, "w+1 e"],
    state: Float[Array, "b w-1 e"] | None,
    plan: Plan,
    *,
    interpret=None,
) -> tuple[Float[Array, "b t e"], Float[Array, "b stretches w+1 e"]]:
    """Returns (dx, gradients of `taps` per row and stretch, to be summed)."""
    kept = plan.w - 1

    def body(*refs):
        x_g, dy_g, taps_g, *state_g, dx_g, dtaps_g = refs[: 5 + plan.has_state]
        x_s, dy_s, before_s, after_s, dx_s, full, early, late = refs[5 + plan.has_state :]
        row, channels, first, count = _place(plan)

        def fetch(i):
            slot = lax.rem(i, jnp.int32(_BACKWARD_STAGES))
            times = pl.ds((first + i) * TILE, TILE)
            for source, target in ((x_g, x_s), (dy_g, dy_s)):
                plgpu.copy_gmem_to_smem(
                    source.at[row, times, channels], target.at[slot], full.at[slot]
                )

        _fetch_before(x_g, before_s, early, row, channels, first, plan)
        for stage in range(_BACKWARD_STAGES):
            pl.when(stage < count)(lambda stage=stage: fetch(jnp.int32(stage)))
        # The w-1 tokens after the stretch read its last rows; after the last stretch there are
        # none, and what is fetched instead counts for nothing.
        end = (first + count) * TILE
        times = pl.ds(jnp.minimum(end, plan.t - kept), kept)
        for k, source in enumerate((x_g, dy_g)):
            plgpu.copy_gmem_to_smem(source.at[row, times, channels], after_s.at[k], late)
        weights = [plan.load(taps_g.at[j, channels]) for j in range(plan.w)]
        bias = plan.load(taps_g.at[plan.w, channels])
        window = _before(before_s, early, state_g, row, channels, first, plan)
        zero = plan.full(0.0)

        def token(window, dy, pending):
            """(dpre, finished row of dx, unfinished rows) of the token that `window` ends with."""
            dpre = dy
            if plan.silu:
                pre = _before_activation(window, weights, bias)
                gate = _sigmoid(pre, plan)
                dpre = dy * (gate * (1.0 + pre * (1.0 - gate)))
            sums = [a + w * dpre for a, w in zip((*pending, zero), weights, strict=True)]
            return dpre, sums[0], sums[1:]

        def send(i):
            plgpu.commit_smem()
            times = pl.ds((first + i) * TILE, TILE)
            source = dx_s.at[lax.rem(i, jnp.int32(2))]
            plgpu.copy_smem_to_gmem(source, dx_g.at[row, times, channels])

        def tile(i, carried):
            window, pending, dtaps = carried
            slot, out = lax.rem(i, jnp.int32(_BACKWARD_STAGES)), lax.rem(i, jnp.int32(2))
            plgpu.barrier_wait(full.at[slot])
            rows = [*window, *(plan.load(x_s.at[slot, u]) for u in range(TILE))]
            dys = [plan.load(dy_s.at[slot, u]) for u in range(TILE)]
            for u in range(TILE):
                dpre, done, pending = token(rows[u : u + plan.w], dys[u], pending)
                products = [dpre * read for read in rows[u : u + plan.w]] + [dpre]
                dtaps = [a + p for a, p in zip(dtaps, products, strict=True)]
                if u >= kept:
                    dx_s[out, u - kept] = done.astype(dx_s.dtype)
                else:
                    # Before the stretch's own first row this writes what is never sent.
                    dx_s[1 - out, TILE - kept + u] = done.astype(dx_s.dtype)
                if u == kept - 1:
                    # The tile before is complete, and its slot free.
                    pl.when(i > 0)(lambda: send(i - 1))
                    refill = (i > 0) & (i - 1 + _BACKWARD_STAGES < count)
                    pl.when(refill)(lambda: fetch(i - 1 + _BACKWARD_STAGES))
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            return tuple(rows[len(rows) - kept :]), tuple(pending), tuple(dtaps)

        zeros = (zero,) * kept
        carried = (tuple(window), zeros, (zero,) * (plan.w + 1))
        window, pending, dtaps = lax.fori_loop(0, count, tile, carried)
        plgpu.barrier_wait(late)
        inside = jnp.where(end < plan.t, 1.0, 0.0).astype(jnp.float32)
        out = lax.rem(count - 1, jnp.int32(2))
        rows = [*window, *(plan.load(after_s.at[0, u]) for u in range(kept))]
        for u in range(kept):
            dy = plan.load(after_s.at[1, u]) * inside
            _, done, pending = token(rows[u : u + plan.w], dy, pending)
            dx_s[out, TILE - kept + u] = done.astype(dx_s.dtype)
        send(count - 1)
        for j in range(plan.w + 1):
            dtaps_g[row, lax.axis_index("stretch"), j, channels] = dtaps[j]
        plgpu.wait_smem_to_gmem(0)

    block = (TILE, plan.channels)
    dtaps_type = jax.ShapeDtypeStruct((plan.b, plan.stretches, plan.w + 1, plan.e), jnp.float32)
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype), dtaps_type],
        scratch_types=[
            plgpu.SMEM((_BACKWARD_STAGES, *block), x.dtype),
            plgpu.SMEM((_BACKWARD_STAGES, *block), dy.dtype),
            plgpu.SMEM((kept, plan.channels), x.dtype),
            plgpu.SMEM((2, kept, plan.channels), x.dtype),
            plgpu.SMEM((2, *block), x.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=_BACKWARD_STAGES),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=plan.grid,
        grid_names=_GRID_NAMES,
        compiler_params=_compiler_params(),
        interpret=interpret,
    )(x, dy, taps, *_present(state))


def _place(plan: Plan):
    """(row of the batch, its channels, first tile, number of tiles) of this program."""
    per_stretch = STRETCH // TILE
    first = lax.axis_index("stretch") * per_stretch
    count = jnp.minimum(per_stretch, plan.t // TILE - first)
    channels = pl.ds(lax.axis_index("block") * plan.channels, plan.channels)
    return lax.axis_index("row"), channels, first, count


def _fetch_before(x_g, before_s, early, row, channels, first, plan: Plan) -> None:
    """Fetches the w-1 tokens before the stretch; before the first something that is not used."""
    times = pl.ds(jnp.maximum(first * TILE - (plan.w - 1), 0), plan.w - 1)
    plgpu.copy_gmem_to_smem(x_g.at[row, times, channels], before_s, early)


def _before(before_s, early, state_g, row, channels, first, plan: Plan) -> list[jax.Array]:
    """The w-1 rows before the stretch: x, before the first stretch the initial state or zero."""
    plgpu.barrier_wait(early)
    rows = [plan.load(before_s.at[k]) for k in range(plan.w - 1)]
    if plan.has_state:
        starts = [plan.load(state_g[0].at[row, k, channels]) for k in range(plan.w - 1)]
    else:
        starts = [plan.full(0.0)] * (plan.w - 1)
    return [jnp.where(first == 0, a, b) for a, b in zip(starts, rows, strict=True)]


def _before_activation(rows, weights, bias) -> jax.Array:
    pre = bias
    for value, weight in zip(rows, weights, strict=True):
        pre = pre + value * weight
    return pre


def _sigmoid(v: jax.Array, plan: Plan) -> jax.Array:
    """1 / (1 + exp(-v)); to about 2e-4 by the hardware's tanh where values are rounded to bf16."""
    if plan.rough:
        return 0.5 + 0.5 * jnp.tanh(0.5 * v)
    return 1.0 / (1.0 + jnp.exp2(jnp.minimum(v * -_LOG2E, 126.0)))


def _present(*arrays: Array | None) -> list[Array]:
    return [array for array in arrays if array is not None]


def _compiler_params() -> plgpu.CompilerParams:
    # A lane reads and writes shared memory of its own channels only; what the copy engine reads or
    # overwrites stands behind a commit.
    return plgpu.CompilerParams(
        approx_math=True,
        unsafe_no_auto_barriers=True,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
    )
