# SPDX-License-Identifier: Apache-2.0
"""`selective_scan` in Triton, for the GPUs that the Mosaic kernels do not serve.

The kernels (`triton_kernels.py`) do what those of Mosaic do and are put together by the same
`segmented.py`; Triton itself is imported when a call is traced.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import devices, triton_call
from pallas_kernels.selective_scan import segmented
from pallas_kernels.selective_scan.mosaic_steps import CHANNELS, TILE, Plan


def supports(device: devices.Device, arguments: dict) -> str | None:
    """Returns None if the kernels can run this call, else why they cannot."""
    return triton_call.missing(device) or segmented.refusal(arguments)


def run(**arguments) -> tuple[Float[Array, "b t e"], Float[Array, "b e n"]]:
    """See `selective_scan`."""
    return segmented.run(_KERNELS, **arguments)


def _scan(x, dt, z, rows, rate, D, bias, states, plan: Plan, *, out_dtype, keep, interpret):
    """See `mosaic_forward.scan`."""
    del interpret
    kept = (plan.b, plan.tiles, plan.n, plan.e) if keep else (1,)
    out_type = [
        jax.ShapeDtypeStruct(x.shape, out_dtype),
        jax.ShapeDtypeStruct(states.shape, jnp.float32),
        jax.ShapeDtypeStruct(kept, jnp.float32),
        jax.ShapeDtypeStruct((1,), jnp.float32),
    ]
    arrays = (x, dt, x if z is None else z, rows, rate, D, bias, states)
    y, end, kept, _ = _launch("forward", arrays, out_type, plan, keep=keep, output=True)
    return y, end, kept if keep else None


def _segment_states(x, dt, rows, rate, bias, plan: Plan, *, interpret):
    """See `mosaic_forward.segment_states`."""
    del interpret
    states, sums = _per_segment(plan)
    nothing = jax.ShapeDtypeStruct((1,), jnp.float32)
    arrays = (x, dt, x, rows, rate, bias, bias, rate)
    out_type = [nothing, states, nothing, sums]
    _, end, _, total = _launch("forward", arrays, out_type, plan, keep=False, output=False)
    return end, total


def _scan_gradients(x, dt, z, rows, rate, D, bias, dy, kept, carries, plan: Plan, *, interpret):
    """See `mosaic_backward.scan`."""
    del interpret
    states, sums = _per_segment(plan)
    f32 = jnp.float32

    def like(value):
        return jax.ShapeDtypeStruct(value.shape, value.dtype)

    padded_n = _power_of_two(plan.n)
    out_type = {
        "x": like(x),
        "dt": like(dt),
        "z": jax.ShapeDtypeStruct((1,), x.dtype) if z is None else like(z),
        "rows": jax.ShapeDtypeStruct((plan.b, plan.blocks, plan.t * 2 * plan.n), f32),
        "A": states,
        "D": sums,
        "bias": sums,
        "carry": states,
        "work": jax.ShapeDtypeStruct((plan.b, plan.segments, TILE, padded_n, plan.e), f32),
    }
    arrays = (x, dt, x if z is None else z, rows, rate, D, bias, dy, kept, carries)
    outputs = _launch("backward", arrays, list(out_type.values()), plan)
    return dict(zip(out_type, outputs, strict=True))


def _segment_carries(dt, z, dy, rows, rate, bias, plan: Plan, *, interpret):
    """See `mosaic_backward.segment_carries`."""
    del interpret
    arrays = (dt, dy if z is None else z, dy, rows, rate, bias)
    return tuple(_launch("carries", arrays, list(_per_segment(plan)), plan))


_KERNELS = segmented.Kernels(_scan, _segment_states, _scan_gradients, _segment_carries)


def _per_segment(plan: Plan) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Types of a state and of a number per segment and channel."""
    states = jax.ShapeDtypeStruct((plan.b, plan.segments, plan.n, plan.e), jnp.float32)
    return states, jax.ShapeDtypeStruct((plan.b, plan.segments, plan.e), jnp.float32)


def _launch(name: str, arrays, out_type, plan: Plan, **flags: bool) -> list[Array]:
    from pallas_kernels.selective_scan import triton_kernels

    constants = {
        "T": plan.t,
        "E": plan.e,
        "PER_SEGMENT": plan.tiles_per_segment,
        "SEGMENTS": plan.segments,
        "GROUPS": plan.blocks // plan.blocks_per_group,
        "PER_GROUP": plan.blocks_per_group,
        "N": plan.n,
        "NP": _power_of_two(plan.n),
        "ROW": plan.row,
        "TILE": TILE,
        "CHANNELS": CHANNELS,
        "SOFTPLUS": plan.softplus,
        "FLAGS": plan.has_flags,
    }
    if name != "carries":
        constants |= {"TILES": plan.tiles}
    if name == "backward":
        constants |= {"BLOCKS": plan.blocks}
    constants |= {key.upper(): value for key, value in flags.items()} | {"HAS_Z": plan.has_z}
    return triton_call.triton_call(
        getattr(triton_kernels, name), *arrays, out_type=out_type, grid=plan.grid, num_warps=4,
        **constants,
    )  # fmt: skip


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
