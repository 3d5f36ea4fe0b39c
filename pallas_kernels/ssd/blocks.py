# SPDX-License-Identifier: Apache-2.0
"""One block of `ssd`: k chunks of q tokens, all at once, forward and backward.

Pure functions of arrays, called by the loop in `xla.py`. Notation of einsum: b batch, k chunk,
q target and s source token in a chunk, g group, j head in its group (h = g * j), p headdim,
n d_state; B and C stay per group. A state is (b, g, n, j, p), so that most products take and give
it as it lies. Operands of products have the dtype of x; everything else, and
every sum, is in the dtype of the steps (float32, or float64). `README.md` derives the formulas.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels import chunking


class Tokens(NamedTuple):
    """The arguments of a block that have a time axis, cut into chunks.

    Attributes:
      x: (b, k, q, h, p).
      step: (b, k, q, h), float32, 0 for padding.
      log_decay: (b, k, q, h), float32, as `chunking.bounded_log_decay` leaves it.
      B: (b, k, q, g, n), dtype of x.
      C: (b, k, q, g, n), dtype of x.
      z: (b, k, q, h, p), dtype of x, or None.
      is_real: (b, k, q), or None when every token is.
    """

    x: Float[Array, "b k q h p"]
    step: Float[Array, "b k q h"]
    log_decay: Float[Array, "b k q h"]
    B: Float[Array, "b k q g n"]
    C: Float[Array, "b k q g n"]
    z: Float[Array, "b k q h p"] | None
    is_real: Bool[Array, "b k q"] | None


class _Parts(NamedTuple):
    """What the forward and the backward pass both need, recomputed in the latter."""

    x: Float[Array, "b k s g j p"]
    B: Float[Array, "b k s g n"]
    C: Float[Array, "b k q g n"]
    step: Float[Array, "b k s g j"]
    stepped_x: Float[Array, "b k s g j p"]
    scores: Float[Array, "b k g 1 q s"]
    decay: Float[Array, "b k g j q s"]
    decay_in: Float[Array, "b k q g j"]
    decay_out: Float[Array, "b k s g j"]
    decay_across: Float[Array, "b g j k+1 k+1"]


def forward(
    tokens: Tokens, D: Float[Array, "h p"] | None, state: Float[Array, "b g n j p"]
) -> tuple[Float[Array, "b k q h p"], Float[Array, "b k q h p"], Float[Array, "b g n j p"]]:
    """Returns the output, y before the gate and the state behind the block."""
    parts = _prepare(tokens)
    wide = parts.step.dtype
    weights = (parts.scores * parts.decay).astype(parts.x.dtype)
    y = _product("bkgjqs,bksgjp->bkqgjp", weights, parts.stepped_x, wide)
    chunk_states = _product("bksgn,bksgjp->bkgnjp", parts.B, _decayed_x(parts), wide)
    incoming, state = _pass_states(parts.decay_across, state, chunk_states)
    y += _read(parts, incoming) * parts.decay_in[..., None]
    y = y.reshape(tokens.x.shape)
    if D is not None:
        y += parts.x.reshape(y.shape) * D[None, None, None]
    out = y if tokens.z is None else y * jax.nn.silu(_real(tokens.z, tokens).astype(y.dtype))
    out = _real(out, tokens).astype(tokens.x.dtype)
    return out, y.astype(tokens.x.dtype), state


def backward(
    tokens: Tokens,
    D: Float[Array, "h p"] | None,
    y: Float[Array, "b k q h p"] | None,
    state: Float[Array, "b g n j p"],
    d_out: Float[Array, "b k q h p"],
    d_state: Float[Array, "b g n j p"],
) -> tuple[Tokens, Float[Array, "h p"] | None, Float[Array, "b g n j p"]]:
    """Returns the cotangents of `tokens`, of `D` and of the state before the block.

    Args:
      tokens: As `forward` got them.
      D: As `forward` got it.
      y: y before the gate; None without one.
      state: The state before the block.
      d_out: Cotangent of the output.
      d_state: Cotangent of the state behind the block.
    """
    parts = _prepare(tokens)
    wide, dtype, groups = parts.step.dtype, parts.x.dtype, parts.B.shape[3]
    d_y, d_z = _gate_backward(tokens, y, _real(d_out, tokens).astype(wide))
    d_D = None if D is None else jnp.sum(d_y * parts.x.reshape(d_y.shape), axis=(0, 1, 2))
    d_skip = 0 if D is None else _by_group(d_y * D[None, None, None], groups, axis=3)
    d_y = _by_group(d_y, groups, axis=3)

    # What each chunk reads from its incoming state, and how states pass through the block.
    decayed_x = _decayed_x(parts)
    incoming, chunk_states = state[:, None], None
    if tokens.x.shape[1] > 1:
        chunk_states = _product("bksgn,bksgjp->bkgnjp", parts.B, decayed_x, wide)
        incoming, _ = _pass_states(parts.decay_across, state, chunk_states)
    d_C, d_decay_in = _read_backward(parts, incoming.astype(dtype), d_y)
    d_read = (d_y * parts.decay_in[..., None]).astype(dtype)
    d_incoming = _product("bkqgn,bkqgjp->bkgnjp", parts.C, d_read, wide)
    d_chunk_states, d_state, d_totals = _pass_states_backward(
        parts.decay_across, state, chunk_states, d_incoming, d_state
    )

    # What each chunk leaves behind.
    d_chunk_states = d_chunk_states.astype(dtype)
    d_decayed_x = _product("bksgn,bkgnjp->bksgjp", parts.B, d_chunk_states, wide)
    d_B = _product("bksgjp,bkgnjp->bksgn", decayed_x, d_chunk_states, wide)
    d_decay_out = jnp.sum(d_decayed_x * parts.stepped_x, axis=-1) * parts.decay_out

    # Inside the chunk. The decay's exponents get d_weights * weights, entry by entry.
    narrow_d_y = d_y.astype(dtype)
    weights = parts.scores * parts.decay
    d_weights = _product("bkqgjp,bksgjp->bkgjqs", narrow_d_y, parts.stepped_x, wide)
    d_scores = jnp.sum(d_weights * parts.decay, axis=3).astype(dtype)
    d_C += _product("bkgqs,bksgn->bkqgn", d_scores, parts.B, wide)
    d_B += _product("bkgqs,bkqgn->bksgn", d_scores, parts.C, wide)
    d_stepped_x = d_decayed_x * parts.decay_out[..., None]
    d_stepped_x += _product(
        "bkgjqs,bkqgjp->bksgjp", weights.astype(dtype), narrow_d_y, parts.step.dtype
    )

    d_log_decay = (
        chunking.segment_sums_transpose(d_weights * weights)
        + chunking.sums_from(d_decay_in)
        + chunking.sums_before(_time_last(d_decay_out))
        + d_totals[..., None]
    )
    d_step = jnp.sum(d_stepped_x * parts.x, axis=-1)
    d_x = d_stepped_x * parts.step[..., None] + d_skip
    cotangents = Tokens(
        x=d_x.reshape(tokens.x.shape).astype(dtype),
        step=d_step.reshape(tokens.step.shape),
        log_decay=jnp.moveaxis(d_log_decay, -1, 2).reshape(tokens.step.shape),
        B=d_B.astype(dtype),
        C=d_C.astype(dtype),
        z=d_z,
        is_real=None,
    )
    return cotangents, d_D, d_state


def _prepare(tokens: Tokens) -> _Parts:
    groups = tokens.B.shape[3]
    x = _by_group(_real(tokens.x, tokens), groups, axis=3)
    B, C = _real(tokens.B, tokens), _real(tokens.C, tokens)
    step, log_decay = (_by_group(v, groups, axis=3) for v in (tokens.step, tokens.log_decay))
    log_decay = _time_last(log_decay)
    totals = jnp.moveaxis(jnp.sum(log_decay, axis=-1), 1, -1)
    totals = jnp.pad(totals, [(0, 0)] * 3 + [(1, 0)])
    scores = _product("bkqgn,bksgn->bkgqs", C, B, step.dtype)
    return _Parts(
        x=x,
        B=B,
        C=C,
        step=step,
        stepped_x=(x.astype(step.dtype) * step[..., None]).astype(x.dtype),
        scores=scores[:, :, :, None],
        decay=chunking.segment_decays(log_decay),
        decay_in=jnp.moveaxis(jnp.exp(chunking.sums_through(log_decay)), -1, 2),
        decay_out=jnp.moveaxis(jnp.exp(chunking.sums_after(log_decay)), -1, 2),
        decay_across=chunking.segment_decays(totals),
    )


def _decayed_x(parts: _Parts) -> Float[Array, "b k s g j p"]:
    """x times its step, decayed to the end of the chunk."""
    return (parts.stepped_x * parts.decay_out[..., None]).astype(parts.x.dtype)


def _read(parts: _Parts, incoming: Float[Array, "b k g n j p"]) -> Float[Array, "b k q g j p"]:
    """What C reads from the chunk's incoming state, before that has decayed."""
    incoming = incoming.astype(parts.x.dtype)
    return _product("bkqgn,bkgnjp->bkqgjp", parts.C, incoming, parts.step.dtype)


def _read_backward(
    parts: _Parts, incoming: Float[Array, "b k g n j p"], d_y: Float[Array, "b k q g j p"]
) -> tuple[Float[Array, "b k q g n"], Float[Array, "b k g j q"]]:
    """Returns what reading the incoming state adds to the cotangents of C and of `decay_in`.

    The latter is that of its exponent. Per head first, so that one product serves both.
    """
    dtype, wide = parts.x.dtype, parts.step.dtype
    per_head = _product("bkqgjp,bkgnjp->bkgjqn", d_y.astype(dtype), incoming, wide)
    per_head *= _time_last(parts.decay_in)[..., None]
    C = jnp.moveaxis(parts.C, 2, 3)[:, :, :, None]
    return jnp.moveaxis(jnp.sum(per_head, axis=3), 2, 3), jnp.sum(per_head * C, axis=-1)


def _pass_states(
    decay_across: Float[Array, "b g j k+1 k+1"],
    state: Float[Array, "b g n j p"],
    chunk_states: Float[Array, "b k g n j p"],
) -> tuple[Float[Array, "b k g n j p"], Float[Array, "b g n j p"]]:
    """Returns the state before each chunk and the one behind the last."""
    if chunk_states.shape[1] == 1:
        decay = decay_across[:, :, None, :, None, 1, 0]
        return state[:, None], decay * state + chunk_states[:, 0]
    sources = jnp.concatenate([state[:, None], chunk_states], axis=1)
    states = _across("bgjcz,bzgnjp->bcgnjp", decay_across, sources)
    return states[:, :-1], states[:, -1]


def _pass_states_backward(
    decay_across: Float[Array, "b g j k+1 k+1"],
    state: Float[Array, "b g n j p"],
    chunk_states: Float[Array, "b k g n j p"] | None,
    d_incoming: Float[Array, "b k g n j p"],
    d_leaving: Float[Array, "b g n j p"],
) -> tuple[Float[Array, "b k g n j p"], Float[Array, "b g n j p"], Float[Array, "b k g j"]]:
    """Returns the cotangents of the chunk states, of `state` and of the chunks' log decays."""
    if chunk_states is None:
        decay = decay_across[..., 1, 0]
        d_total = decay * jnp.sum(d_leaving * state, axis=(2, 4))
        d_state = d_incoming[:, 0] + decay[:, :, None, :, None] * d_leaving
        return d_leaving[:, None], d_state, d_total[:, None]
    sources = jnp.concatenate([state[:, None], chunk_states], axis=1)
    d_states = jnp.concatenate([d_incoming, d_leaving[:, None]], axis=1)
    d_sources = _across("bgjcz,bcgnjp->bzgnjp", decay_across, d_states)
    d_across = _across("bcgnjp,bzgnjp->bgjcz", d_states, sources)
    d_totals = chunking.segment_sums_transpose(jnp.tril(d_across) * decay_across)[..., 1:]
    return d_sources[:, 1:], d_sources[:, 0], jnp.moveaxis(d_totals, -1, 1)


def _gate_backward(
    tokens: Tokens, y: Float[Array, "b k q h p"] | None, d_out: Float[Array, "b k q h p"]
) -> tuple[Float[Array, "b k q h p"], Float[Array, "b k q h p"] | None]:
    """Returns the cotangents of y before the gate and of z."""
    if tokens.z is None:
        return d_out, None
    z = _real(tokens.z, tokens).astype(d_out.dtype)
    sigmoid = jax.nn.sigmoid(z)
    d_z = d_out * y.astype(d_out.dtype) * sigmoid * (1 + z * (1 - sigmoid))
    return d_out * z * sigmoid, d_z.astype(tokens.z.dtype)


def _product(spec: str, left: Array, right: Array, dtype: jnp.dtype) -> Array:
    """A product of activations, summed and returned in `dtype`."""
    return jnp.einsum(spec, left, right, preferred_element_type=dtype)


def _across(spec: str, left: Array, right: Array) -> Array:
    """A product of states, always in full precision."""
    return jnp.einsum(spec, left, right, precision=jax.lax.Precision.HIGHEST)


def _by_group(values: Array, groups: int, axis: int) -> Array:
    """Splits the axis of heads in (groups, heads of a group)."""
    return values.reshape(*values.shape[:axis], groups, -1, *values.shape[axis + 1 :])


def _time_last(values: Float[Array, "b k q g j"]) -> Float[Array, "b k g j q"]:
    return jnp.moveaxis(values, 2, -1)


def _real(values: Array, tokens: Tokens) -> Array:
    """Zero at padding, whatever stands there."""
    if tokens.is_real is None:
        return values
    mask = tokens.is_real.reshape(tokens.is_real.shape + (1,) * (values.ndim - 3))
    return jnp.where(mask, values, 0)
