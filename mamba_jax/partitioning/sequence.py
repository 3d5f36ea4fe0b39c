# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: one row's tokens cut over devices, the scan's state handed on.

Inside `shard_map` over the "sequence" axis, device i holds piece i of every row. A scan maps the
state that enters a piece to the one that leaves it by an affine map,

    leaving = decay · entering + own,

and maps of neighbouring pieces compose. So each device scans its piece once from nothing to get its
own map (the outputs of this pass are never computed where the compiler can drop them), the maps are
combined over devices in log2(pieces) exchanges, and each device scans its piece from the state that
really enters it. Everything is differentiable; the exchanges transpose into exchanges.

Documents: a piece in which a document begins forgets what entered it (decay 0), and a piece whose
first real token is of another document than the last real token before it starts from nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mamba_jax.array_types import Array, Bool
from pallas_kernels.packing import resolve

AXIS = "sequence"


class _Documents(NamedTuple):
    """How a piece joins its row's documents; every field is (b,) bool.

    Attributes:
      first: No real token comes before this piece.
      continues: The first real token carries on the document of the last real one before.
      passes: No document begins inside the piece, after its first real token.
      is_padding: The piece holds no real token.
    """

    first: Bool[Array, " b"]
    continues: Bool[Array, " b"]
    passes: Bool[Array, " b"]
    is_padding: Bool[Array, " b"]


def scan(name: str, op: Callable[..., Any], *, initial_state: Any = None, **call: Any) -> Any:
    """Runs a scan op on this device's piece of each row.

    Args:
      name: "ssd", "selective_scan" or "mamba3_scan".
      op: The operation.
      initial_state: State before the row's first token, the same on every device of the axis.
      **call: The op's other arguments; those with a time axis hold this device's piece.

    Returns:
      y: This piece's outputs.
      final_state: State after the row's last real token, the same on every device of the axis.
    """
    documents = _documents(call["x"].shape[0], call.get("seq_idx"))
    if name == "mamba3_scan":
        return _mamba3_scan(op, initial_state, call, documents)
    shape = _state_shape(name, call)
    if initial_state is None:
        initial_state = jnp.zeros(shape, _wide(call["x"].dtype))
    _, own = op(**call)
    decay = _decay(jnp.exp(_log_decay(name, call)), documents)
    entering, leaving = _enter((decay, own), initial_state, documents)
    y, _ = op(initial_state=entering, **call)
    return y, leaving


def causal_conv1d(
    op: Callable[..., Any],
    *,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    seq_idx: Array | None = None,
    initial_state: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """Runs the causal convolution on this device's piece of each row.

    The last w-1 real inputs before the piece may lie several pieces back when pieces are short or
    padded, so windows are composed like the scans' states.
    """
    batch, _, channels = x.shape
    rows = weight.shape[1] - 1
    if initial_state is None:
        initial_state = jnp.zeros((batch, rows, channels), x.dtype)
    documents = _documents(batch, seq_idx)
    is_real = jnp.ones(x.shape[:2], bool) if seq_idx is None else seq_idx >= 0
    _, own = op(x, weight, bias, seq_idx=seq_idx, **options)
    # How many rows of the window this piece pushed out; all of them if it starts afresh.
    pushed = jnp.minimum(jnp.sum(is_real, axis=1, dtype=jnp.int32), rows)
    fresh = ~(documents.continues | documents.first | documents.is_padding) | ~documents.passes
    piece = (jnp.where(fresh, rows, pushed), own)

    def combine(earlier, later):
        pushed_earlier, window_earlier = earlier
        pushed_later, window_later = later
        index = jnp.arange(rows)[None, :] + pushed_later[:, None]
        kept = jnp.take_along_axis(
            window_earlier, jnp.minimum(index, max(rows - 1, 0))[:, :, None], axis=1
        )
        window = jnp.where((index < rows)[:, :, None], kept, 0) + window_later
        return jnp.minimum(pushed_earlier + pushed_later, rows), window

    start = (jnp.zeros((batch,), jnp.int32), initial_state)
    identity = (jnp.zeros((batch,), jnp.int32), jnp.zeros_like(initial_state))
    before = combine(start, _exclusive(combine, piece, identity))
    after = combine(before, piece)
    enters = (documents.first | documents.continues)[:, None, None]
    entering = jnp.where(enters, before[1], 0)
    y, _ = op(x, weight, bias, seq_idx=seq_idx, initial_state=entering, **options)
    return y, _from_last(after[1])


def _mamba3_scan(
    op: Callable[..., Any], initial_state: Any, call: dict[str, Any], documents: _Documents
) -> tuple[Array, Any]:
    """Mamba-3's hand-over: first the angle, then the last token's B and x, then the state.

    The angle only adds up. Once it is known, the last token's rotated B and its x are too; they
    enter the next piece's first token. With both in place the state's map is affine as elsewhere.
    """
    _, own = op(**call)
    if initial_state is None:
        initial_state = jax.tree.map(jnp.zeros_like, own)
    keeps = _decay(jnp.ones_like(own.angle), documents)
    angle, last_angle = _enter((keeps, own.angle), initial_state.angle, documents)
    nothing = initial_state._replace(
        angle=angle,
        ssm=jnp.zeros_like(initial_state.ssm),
        B=jnp.zeros_like(initial_state.B),
        x=jnp.zeros_like(initial_state.x),
    )
    _, own = op(initial_state=nothing, **call)
    # The last token of the row so far: a piece of padding hands on what it was given.
    padding = documents.is_padding[:, None, None]
    B, last_B = _enter((padding[..., None], own.B), initial_state.B, documents)
    x, last_x = _enter((padding, own.x), initial_state.x, documents)
    _, own = op(initial_state=nothing._replace(B=B, x=x), **call)
    decay = _decay(jnp.exp(_log_decay("mamba3_scan", call)), documents)
    ssm, last_ssm = _enter((decay, own.ssm), initial_state.ssm, documents)
    entering = initial_state._replace(angle=angle, ssm=ssm, B=B, x=x)
    y, _ = op(initial_state=entering, **call)
    leaving = initial_state._replace(angle=last_angle, ssm=last_ssm, B=last_B, x=last_x)
    return y, leaving


def _enter(piece: tuple[Array, Array], initial: Array, documents: _Documents) -> Any:
    """The state that enters this piece, and the one that leaves the row's last piece."""
    dtype = initial.dtype
    decay, own = piece[0].astype(_wide(dtype)), piece[1].astype(_wide(dtype))
    identity = (jnp.ones_like(decay), jnp.zeros_like(own))
    decay_before, own_before = _exclusive(_compose, (decay, own), identity)
    before = decay_before * initial.astype(own.dtype) + own_before
    after = decay * before + own
    joins = (documents.first | documents.continues).reshape((-1,) + (1,) * (own.ndim - 1))
    entering = jnp.where(joins, before, 0)
    return entering.astype(dtype), _from_last(after).astype(dtype)


def _compose(earlier: tuple[Array, Array], later: tuple[Array, Array]) -> tuple[Array, Array]:
    return earlier[0] * later[0], later[0] * earlier[1] + later[1]


def _exclusive(combine: Callable[[Any, Any], Any], piece: Any, identity: Any) -> Any:
    """Combines the pieces of all earlier devices, in log2(devices) exchanges."""
    devices = jax.lax.axis_size(AXIS)
    index = jax.lax.axis_index(AXIS)

    def from_earlier(value: Any, distance: int) -> Any:
        pairs = [(i, i + distance) for i in range(devices - distance)]
        moved = jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, AXIS, pairs), value)
        return jax.tree.map(
            lambda new, none: jnp.where(index >= distance, new, none), moved, identity
        )

    total = from_earlier(piece, 1)
    distance = 1
    while distance < devices:
        total = combine(from_earlier(total, distance), total)
        distance *= 2
    return total


def _from_last(value: Array) -> Array:
    """Gives every device the last one's value."""
    is_last = jax.lax.axis_index(AXIS) == jax.lax.axis_size(AXIS) - 1
    return jax.lax.psum(jnp.where(is_last, value, 0), AXIS)


def _documents(batch: int, seq_idx: Array | None) -> _Documents:
    yes = jnp.ones((batch,), bool)
    if seq_idx is None:
        first = jnp.broadcast_to(jax.lax.axis_index(AXIS) == 0, (batch,))
        return _Documents(first, yes, yes, ~yes)
    packing = resolve(seq_idx)
    has_real = packing.last_real >= 0
    first_real = jnp.argmax(packing.is_real, axis=1)
    first_id = jnp.take_along_axis(packing.carried_id, first_real[:, None], axis=1)[:, 0]

    def later_if_real(earlier, later):
        return earlier[0] | later[0], jnp.where(later[0], later[1], earlier[1])

    piece = (has_real, packing.carried_id[:, -1])
    any_before, id_before = _exclusive(later_if_real, piece, (~yes, jnp.zeros_like(first_id)))
    return _Documents(
        first=~any_before,
        continues=any_before & has_real & (first_id == id_before),
        passes=~jnp.any(packing.starts, axis=1),
        is_padding=~has_real,
    )


def _decay(decay: Array, documents: _Documents) -> Array:
    """Zero where what enters a piece does not reach its end."""
    joins = documents.first | documents.continues | documents.is_padding
    reaches = (joins & documents.passes).reshape((-1,) + (1,) * (decay.ndim - 1))
    return jnp.where(reaches, decay, 0)


def _log_decay(name: str, call: dict[str, Any]) -> Array:
    """Sum over the piece of the log decays, shaped to multiply the state."""
    if name == "mamba3_scan":
        step, rate = call["log_decay"].astype(_wide(call["log_decay"].dtype)), None
    else:
        rate = call["A"]
        step = call["dt"].astype(_wide(call["dt"].dtype))
        if call.get("dt_bias") is not None:
            step = step + call["dt_bias"][None, None, :]
        if call.get("dt_softplus"):
            step = jax.nn.softplus(step)
        if call.get("dt_limit") is not None:
            step = jnp.clip(step, *call["dt_limit"])
    if call.get("seq_idx") is not None:
        step = jnp.where(call["seq_idx"][:, :, None] >= 0, step, 0)
    total = jnp.sum(step, axis=1)
    if name == "selective_scan":
        return total[:, :, None] * rate[None]
    return (total if rate is None else total * rate[None])[:, :, None, None]


def _state_shape(name: str, call: dict[str, Any]) -> tuple[int, ...]:
    x, n = call["x"], call["B"].shape[-1]
    return (x.shape[0], *x.shape[2:], n)


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)
