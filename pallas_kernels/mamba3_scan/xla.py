# SPDX-License-Identifier: Apache-2.0
"""`mamba3_scan` as matrix products over chunks, for any device.

This file turns a call into what the chunked form needs: weights of every token in its own and in
later outputs, the states before the first and after the last token of each document. The products
are in `xla_block.py`, the loop over them and its gradient in `xla_loop.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import chunking, devices, packing
from pallas_kernels.mamba3_scan import rotary
from pallas_kernels.mamba3_scan.by_document import Span, place
from pallas_kernels.mamba3_scan.readout import per_rank
from pallas_kernels.mamba3_scan.state import Mamba3State
from pallas_kernels.mamba3_scan.xla_block import (
    Carry,
    Layout,
    Marks,
    Parameters,
    Tokens,
    zero_padding,
)
from pallas_kernels.mamba3_scan.xla_loop import loop

# Heads times chunks handled at once. A CPU is busy with one chunk and likes what fits its cache; a
# GPU needs many. The second number is reasoned, not measured.
_HEAD_CHUNKS = {"cpu": 1}
_HEAD_CHUNKS_OTHERWISE = 2048


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
    """See `mamba3_scan`."""
    (b, t, h, p), (r, _, n) = x.shape, B.shape[2:]
    parameters = Parameters(B_bias, C_bias, D, mimo_x, mimo_z, mimo_o, norm_weight)
    wide = jnp.result_type(
        jnp.float32,
        *(v.dtype for v in jax.tree.leaves((x, dt, log_decay, trap, angles, parameters))),
        *(v.dtype for v in jax.tree.leaves(initial_state)),
    )
    parameters = jax.tree.map(lambda v: v.astype(wide), parameters)
    state = _per_document(
        initial_state, (b, num_documents or 1, h, p, n, r, angles.shape[-1]), wide
    )

    layout = _layout(x, r, norm_eps, chunk_size, one_chunk=num_documents is not None)
    tokens = {"x": x, "z": z, "B": B, "C": C, "angles": angles}
    tokens |= {"dt": dt, "log_decay": log_decay, "trap": trap}
    placement = None
    if num_documents is not None:
        placement = place(seq_idx, num_documents, layout.chunk_size)
        tokens = jax.tree.map(placement.to_places, tokens)
        seq_idx = placement.seq_idx
    tokens, marks, later = _weigh(seq_idx, one_document=placement is not None, wide=wide, **tokens)
    span = _span(seq_idx, *dt.shape[:2]) if placement is None else placement.span

    pairs = {"a": angles.shape[-1], "half_split": mimo_x is not None}
    ssm = state.ssm
    if initial_state is not None:
        ssm = ssm + _look_back(state, later, span, parameters.mimo_x)
    entering = Carry(state.angle, rotary.pairs_first(ssm, **pairs))
    ordered = _pairs_first(tokens, **pairs), _pairs_first(parameters, **pairs)
    padded = (
        jax.tree.map(lambda v: chunking.pad_time(v, layout.num_tokens), ordered[0]),
        _pad_marks(marks, layout.num_tokens),
    )
    if placement is None:
        entering = jax.tree.map(lambda v: v[:, 0], entering)
    slots = None if placement is None else placement.slots
    y, leaving = loop(layout, ordered[1], entering, *padded, slots)
    leaving = leaving._replace(ssm=rotary.pairs_back(leaving.ssm, **pairs))
    if placement is None:
        y, leaving = y[:, :t], jax.tree.map(lambda v: v[:, None], leaving)
    else:
        y = placement.to_tokens(y)
    final = _final_state(state, leaving, tokens, span, parameters)
    return y, final if num_documents else jax.tree.map(lambda v: v[:, 0], final)


def _weigh(
    seq_idx, one_document, wide, *, dt, log_decay, trap, **tokens
) -> tuple[Tokens, Marks, Any]:
    """Splits every token's step size between its own output and, through the next, later ones.

    Returns the tokens of the loop, their marks, and the share of dt that looks back.
    """
    dt, log_decay, trap = (v.astype(wide) for v in (dt, log_decay, trap))
    marks, documents = Marks(None, None, None), None
    if seq_idx is not None:
        documents = packing.resolve(seq_idx)
        marks = Marks(documents.is_real, None, None)
        # Padding may hold anything, NaN too; none of it may meet a product.
        dt, log_decay, trap, tokens = jax.tree.map(
            lambda v: zero_padding(v, documents.is_real), (dt, log_decay, trap, tokens)
        )
    if seq_idx is not None and not one_document:
        marks = Marks(documents.is_real, documents.document, None)
    starts = None if documents is None or one_document else documents.starts
    log_decay = chunking.bounded_log_decay(log_decay, starts)
    gate = jax.nn.sigmoid(trap)
    now, later = gate * dt, (1 - gate) * dt
    share = now + _of_next(later, documents)
    return Tokens(**tokens, dt=dt, log_decay=log_decay, now=now, share=share), marks, later


def _pad_marks(marks: Marks, multiple: int) -> Marks:
    """Fills the last stretch with padding of the last document, which leaves its angle alone."""
    is_real = None if marks.is_real is None else chunking.pad_time(marks.is_real, multiple)
    if marks.document is None:
        return marks._replace(is_real=is_real)
    missing = -marks.document.shape[1] % multiple
    document = jnp.pad(marks.document, ((0, 0), (0, missing)), mode="edge")
    return Marks(is_real, document, jnp.pad(document[:, :-1], ((0, 0), (1, 0))))


def _of_next(later: Float[Array, "b t h"], documents: packing.Packing | None) -> Array:
    """`later` of the next real token of the same document; 0 at the last and at padding."""
    if documents is None:
        return jnp.pad(later[:, 1:], ((0, 0), (0, 1), (0, 0)))
    b, t = documents.document.shape
    time = jnp.broadcast_to(jnp.arange(t)[None], (b, t))
    at_or_after = jax.lax.cummin(jnp.where(documents.is_real, time, t), axis=1, reverse=True)
    following = jnp.pad(at_or_after[:, 1:], ((0, 0), (0, 1)), constant_values=t)
    index = jnp.minimum(following, t - 1)
    continues = jnp.take_along_axis(documents.document, index, axis=1) == documents.document
    continues &= documents.is_real & (following < t)
    values = jnp.take_along_axis(later, index[..., None], axis=1)
    return jnp.where(continues[..., None], values, 0)


def _look_back(state: Mamba3State, later, span: Span, mimo_x) -> Float[Array, "b s h p n"]:
    """What the first token of each document adds to the initial state from the token before it."""
    weight = jnp.take_along_axis(later, span.first[..., None], axis=1)
    weight = jnp.where(span.occurs[..., None], weight, 0)[..., None, None]
    x = per_rank(state.x, mimo_x)
    return weight * jnp.sum(x[..., None] * state.B[..., None, :], axis=2)


def _final_state(
    initial: Mamba3State, leaving: Carry, tokens: Tokens, span: Span, parameters: Parameters
) -> Mamba3State:
    """The states after the loop, with each document's last B and x."""
    (b, s), h = initial.B.shape[:2], initial.B.shape[3]
    row = jnp.arange(b)[:, None]
    # The angle after a document's last token is the document's final angle.
    B = tokens.B[row, span.last].astype(initial.B.dtype)
    B = jnp.repeat(B, h // B.shape[3], axis=3) + jnp.swapaxes(parameters.B_bias, 0, 1)[None, None]
    B = rotary.rotate(B, leaving.angle[:, :, None], parameters.mimo_x is not None)
    x = tokens.x[row, span.last].astype(initial.x.dtype)
    final = Mamba3State(leaving.angle, leaving.ssm, B, x)

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(span.occurs.reshape(b, s, *(1,) * (new.ndim - 2)), new, old)

    return jax.tree.map(choose, final, initial)


def _pairs_first(arrays: Any, **pairs: Any) -> Any:
    """Tokens or parameters with the channels of B and C in the loop's order."""
    names = [name for name in ("B", "C", "B_bias", "C_bias") if name in arrays._fields]
    return arrays._replace(
        **{name: rotary.pairs_first(getattr(arrays, name), **pairs) for name in names}
    )


def _span(seq_idx: Int[Array, "b t"] | None, b: int, t: int) -> Span:
    """That of whole rows."""
    if seq_idx is None:
        first = jnp.zeros((b, 1), jnp.int32)
        return Span(first, jnp.full_like(first, t - 1), jnp.ones((b, 1), bool))
    is_real = seq_idx >= 0
    first = jnp.argmax(is_real, axis=1, keepdims=True)
    last = t - 1 - jnp.argmax(is_real[:, ::-1], axis=1, keepdims=True)
    return Span(first, last, jnp.any(is_real, axis=1, keepdims=True))


def _per_document(state: Mamba3State | None, sizes: tuple[int, ...], wide: Any) -> Mamba3State:
    """The initial state with a document axis, of size 1 when there is one state per row."""
    b, s, h, p, n, r, a = sizes
    shapes = Mamba3State((b, s, h, a), (b, s, h, p, n), (b, s, r, h, n), (b, s, h, p))
    if state is None:
        return Mamba3State(*(jnp.zeros(shape, wide) for shape in shapes))
    arrays = zip(state, shapes, strict=True)
    return Mamba3State(*(array.astype(wide).reshape(shape) for array, shape in arrays))


def _layout(
    x: Array, rank: int, norm_eps: float, chunk_size: int | None, one_chunk: bool
) -> Layout:
    device = devices.target_device()
    b, t, h, _ = x.shape
    # Rows of the products are tokens times ranks.
    largest = chunking.choose_chunk_size(device, t, None)
    q = min(t, chunk_size or max(16, largest // rank))
    at_once = _HEAD_CHUNKS.get(device.platform, _HEAD_CHUNKS_OTHERWISE) // (b * h)
    # Short chunks go together, so that the states kept for the backward pass stay few.
    num_chunks = max(1, at_once, largest // q)
    return Layout(q, 1 if one_chunk else min(num_chunks, -(-t // q)), norm_eps)
