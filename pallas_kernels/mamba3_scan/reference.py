# SPDX-License-Identifier: Apache-2.0
"""The definition of `mamba3_scan`: one token after another, in float32 (float64 if any array is).

`advance` is the recurrence itself; `mamba3_step` is defined by it too.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import devices, packing
from pallas_kernels.mamba3_scan import rotary
from pallas_kernels.mamba3_scan.readout import per_rank, read_out
from pallas_kernels.mamba3_scan.state import Mamba3State


def supports(device: devices.Device, arguments: dict) -> str | None:
    """Runs anywhere."""
    return None


def run(
    x: Float[Array, "b t h p"],
    dt: Float[Array, "b t h"],
    log_decay: Float[Array, "b t h"],
    B: Float[Array, "b t r g n"],
    C: Float[Array, "b t r g n"],
    trap: Float[Array, "b t h"],
    angles: Float[Array, "b t 1 a"] | Float[Array, "b t h a"],
    B_bias: Float[Array, "h r n"],
    C_bias: Float[Array, "h r n"],
    D: Float[Array, "h"] | None,
    z: Float[Array, "b t h p"] | None,
    mimo_x: Float[Array, "h r p"] | None,
    mimo_z: Float[Array, "h r p"] | None,
    mimo_o: Float[Array, "h r p"] | None,
    norm_weight: Float[Array, "h p"] | None,
    norm_eps: float,
    seq_idx: Int[Array, "b t"] | None,
    initial_state: Mamba3State | None,
    num_documents: int | None,
    chunk_size: int | None,
) -> tuple[Float[Array, "b t h p"] | Float[Array, "b t r h p"], Mamba3State]:
    """See `mamba3_scan`; `chunk_size` means nothing here."""
    (b, t, h, p), (r, _, n), a = x.shape, B.shape[2:], angles.shape[-1]
    per_token = (x, dt, log_decay, B, C, trap, angles)
    parameters = (B_bias, C_bias, D, mimo_x, mimo_z, mimo_o, norm_weight)
    wide = jnp.result_type(
        jnp.float32, *(v.dtype for v in jax.tree.leaves((per_token, parameters, initial_state)))
    )
    ids = jnp.zeros((b, t), jnp.int32) if seq_idx is None else seq_idx
    documents = packing.resolve(ids)
    s = num_documents or 1
    shapes = Mamba3State((b, s, h, a), (b, s, h, p, n), (b, s, r, h, n), (b, s, h, p))
    if initial_state is None:
        initial_state = Mamba3State(*(jnp.zeros(shape, wide) for shape in shapes))
    states = Mamba3State(
        *(v.astype(wide).reshape(shape) for v, shape in zip(initial_state, shapes, strict=True))
    )

    def token(states, inputs):
        values, slot, starts, is_real = inputs
        row = jnp.arange(b)
        state = jax.tree.map(lambda array: array[row, slot], states)
        if not num_documents:
            state = jax.tree.map(lambda array: jnp.where(_like(starts, array), 0, array), state)
        y, new = advance(state, *values, B_bias, C_bias, mimo_x)
        old_and_new = zip(states, new, strict=True)
        new = (
            old.at[row, slot].set(jnp.where(_like(is_real, array), array, old[row, slot]))
            for old, array in old_and_new
        )
        return Mamba3State(*new), y

    def real(values):
        """Zero at padding, whatever stands there."""
        return jnp.where(_like(documents.is_real, values), values.astype(wide), 0)

    # One state per document: continue that document's. One per row: there is a single slot, and
    # a real token whose document differs from the last real token's starts from zero.
    slot = jnp.maximum(ids, 0) if num_documents else jnp.zeros_like(ids)
    inputs = (tuple(map(real, per_token)), slot, documents.starts, documents.is_real)
    inputs = jax.tree.map(lambda value: jnp.moveaxis(value, 1, 0), inputs)
    states, y = jax.lax.scan(token, states, inputs)
    z = None if z is None else real(z)
    y = read_out(
        jnp.moveaxis(y, 0, 1), real(x), D, z, mimo_x, mimo_z, mimo_o, norm_weight, norm_eps
    )
    if not num_documents:
        states = jax.tree.map(lambda array: array[:, 0], states)
    return y.astype(x.dtype), states


def advance(
    state: Mamba3State,
    x: Float[Array, "b h p"],
    dt: Float[Array, "b h"],
    log_decay: Float[Array, "b h"],
    B: Float[Array, "b r g n"],
    C: Float[Array, "b r g n"],
    trap: Float[Array, "b h"],
    angles: Float[Array, "b 1 a"] | Float[Array, "b h a"],
    B_bias: Float[Array, "h r n"],
    C_bias: Float[Array, "h r n"],
    mimo_x: Float[Array, "h r p"] | None,
) -> tuple[Float[Array, "b r h p"], Mamba3State]:
    """Takes in one token; all per-token arrays and the state have one float dtype.

    Returns the state's answer to C for every rank (neither skip nor gate), and the new state.
    """
    half_split = mimo_x is not None
    heads_per_group = x.shape[1] // B.shape[2]
    angle = rotary.wrap(state.angle + rotary.increments(angles, dt))
    B, C = (
        rotary.rotate(
            jnp.repeat(weights, heads_per_group, axis=2)
            + jnp.swapaxes(bias.astype(x.dtype), 0, 1)[None],
            angle[:, None],
            half_split,
        )
        for weights, bias in ((B, B_bias), (C, C_bias))
    )

    def outer(x, B):
        """Sum over the ranks of the outer products of input and input map."""
        return jnp.sum(per_rank(x, mimo_x)[..., None] * B[..., None, :], axis=1)

    now = jax.nn.sigmoid(trap)
    earlier = ((1 - now) * dt)[..., None, None] * outer(state.x, state.B)
    ssm = jnp.exp(log_decay)[..., None, None] * (state.ssm + earlier)
    ssm = ssm + (now * dt)[..., None, None] * outer(x, B)
    y = jnp.sum(ssm[:, None] * C[..., None, :], axis=-1)
    return y, Mamba3State(angle, ssm, B, x)


def _like(mask: Array, array: Array) -> Array:
    """`mask` with axes of 1 appended, to broadcast against `array`."""
    return mask.reshape(mask.shape + (1,) * (array.ndim - mask.ndim))
