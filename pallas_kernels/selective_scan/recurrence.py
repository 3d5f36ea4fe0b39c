# SPDX-License-Identifier: Apache-2.0
"""The bare recurrence of `selective_scan` in chunks, with states recomputed in the backward pass.

Owns what happens between the step sizes and the ungated output; `xla.py` prepares and finishes.
States over time exist for one chunk only, in both passes: the forward pass keeps the state before
each chunk, and the backward pass recomputes the others from it. The README has the derivation.

Layout: time first, in chunks, and channels of a group last: c chunks, l tokens in a chunk, b batch,
g groups, n d_state, q channels of a group (e = g * q), s documents. States are (b, g, n, q), so
that sums over n and q run over contiguous rows of channels.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int

# Sums over so few states are written out, since XLA's CPU code for such sums of products does not
# vectorise (measured: 8 ns an element against 1); beyond it they would bloat the program.
_MOST_STATES_WRITTEN_OUT = 32


class Documents(NamedTuple):
    """Where each document's own state enters and leaves; see `num_documents`.

    Attributes:
      begins: First token of its document.
      ends: Last token of its document.
      slot: Index of the document.
    """

    begins: Bool[Array, "c l b"]
    ends: Bool[Array, "c l b"]
    slot: Int[Array, "c l b"]


class Inputs(NamedTuple):
    """What the recurrence reads, real but for A, B, C and states of a complex recurrence.

    Attributes:
      x: Input; 0 at padding.
      step: Step size; 0 at padding, which leaves the state as it is.
      A: Decay rate per unit step.
      B: Input map, per token and group or constant and per channel.
      C: Output map, likewise.
      initial: State before the first token; with documents, of each document.
      starts: Where the state restarts from zero; None for nowhere.
      documents: Where it restarts from a document's initial state; None without such states.
    """

    x: Float[Array, "c l b g q"]
    step: Float[Array, "c l b g q"]
    A: Inexact[Array, "g n q"]
    B: Inexact[Array, "c l b g n"] | Inexact[Array, "g n q"]
    C: Inexact[Array, "c l b g n"] | Inexact[Array, "g n q"]
    initial: Inexact[Array, "b g n q"] | Inexact[Array, "b s g n q"]
    starts: Bool[Array, "c l b"] | None
    documents: Documents | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(
    associative: bool, inputs: Inputs
) -> tuple[Float[Array, "c l b g q"], Inexact[Array, "b g n q"] | Inexact[Array, "b s g n q"]]:
    """Returns sum(state * C) for every token and the final state (of each document).

    Args:
      associative: Whether a chunk is solved by an associative scan (short in depth, for a GPU) or
        token by token (less work, for a CPU).
      inputs: See there.
    """
    return _forward(associative, inputs)[0]


def _forward(associative: bool, inputs: Inputs):
    """Returns the outputs, and (the inputs, the states before each chunk) for `_backward`."""
    per_chunk, shared = _split(inputs)
    state, finals = _first_states(inputs)

    def chunk(carry, chunk_inputs):
        state, finals = carry
        tokens = _Chunk.of(shared, chunk_inputs)
        states = _states(associative, tokens, state)
        if tokens.documents is not None:
            finals = _add_to_slots(finals, tokens.documents.ends, states, tokens.documents.slot)
        return (states[-1], finals), (_output(states, tokens.C), state)

    (state, finals), (y, before) = jax.lax.scan(chunk, (state, finals), per_chunk)
    if inputs.documents is not None:
        state = jnp.where(_occurs(inputs.documents, finals), finals, inputs.initial)
    return (y, state), (inputs, before)


def _backward(associative: bool, residuals, cotangents) -> tuple[Inputs]:
    inputs, before = residuals
    dy, dfinal = cotangents
    per_chunk, shared = _split(inputs)
    dstate, dinitial = dfinal, None
    if inputs.documents is not None:
        dstate = jnp.zeros_like(before[0])
        dinitial = jnp.where(_occurs(inputs.documents, dfinal), 0, dfinal)
    totals = (
        jnp.zeros_like(inputs.A),
        jnp.zeros_like(inputs.B) if inputs.B.ndim == 3 else None,
        jnp.zeros_like(inputs.C) if inputs.C.ndim == 3 else None,
    )

    def chunk(carry, scanned):
        dstate, dinitial, totals = carry
        chunk_inputs, before, dy = scanned
        tokens = _Chunk.of(shared, chunk_inputs)
        dstate, ddocuments, grads = _chunk_backward(
            associative, tokens, before, dy, dstate, dfinal if dinitial is not None else None
        )
        parts = (grads.pop("A"), grads["B"], grads["C"])
        if dinitial is not None:
            begins, slot = tokens.documents.begins, tokens.documents.slot
            dinitial = _add_to_slots(dinitial, begins, ddocuments, slot)
        summed = tuple(
            None if total is None else total + part
            for total, part in zip(totals, parts, strict=True)
        )
        per_token = {n: None if getattr(inputs, n).ndim == 3 else grads[n] for n in ("B", "C")}
        return (dstate, dinitial, summed), grads | per_token

    (dstate, dinitial, totals), grads = jax.lax.scan(
        chunk, (dstate, dinitial, totals), (per_chunk, before, dy), reverse=True
    )
    dA, dB, dC = totals
    return (
        Inputs(
            x=grads["x"],
            step=grads["step"],
            A=dA,
            B=grads["B"] if dB is None else dB,
            C=grads["C"] if dC is None else dC,
            initial=dstate if dinitial is None else dinitial,
            starts=None,
            documents=None,
        ),
    )


class _Chunk(NamedTuple):
    """One chunk's tokens: the arrays of `Inputs` without the chunk axis."""

    x: Float[Array, "l b g 1 q"]
    step: Float[Array, "l b g 1 q"]
    A: Inexact[Array, "1 1 g n q"]
    B: Inexact[Array, "l b g n"] | Inexact[Array, "g n q"]
    C: Inexact[Array, "l b g n"] | Inexact[Array, "g n q"]
    keep: Float[Array, "l b 1 1 1"] | None
    entering: Inexact[Array, "l b g n q"] | None
    documents: Documents | None

    @classmethod
    def of(cls, shared: dict[str, Any], scanned: dict[str, Any]) -> "_Chunk":
        values = shared | scanned
        x, step = values["x"][:, :, :, None], values["step"][:, :, :, None]
        documents = values["documents"]
        restarts = values["starts"] if documents is None else documents.begins
        keep, entering = None, None
        if restarts is not None:
            keep = 1 - restarts[:, :, None, None, None].astype(step.dtype)
        if documents is not None:
            rows = jnp.arange(x.shape[1])[None]
            entering = values["initial"][rows, documents.slot] * (1 - keep)
        A, B, C = values["A"][None, None], values["B"], values["C"]
        return cls(x, step, A, B, C, keep, entering, documents)


def _states(associative: bool, tokens: _Chunk, state: Array) -> Inexact[Array, "l b g n q"]:
    """The states after each token of a chunk that `state` enters."""
    decay = jnp.exp(tokens.step * tokens.A)
    extra = None if tokens.entering is None else decay * tokens.entering
    decay = decay if tokens.keep is None else decay * tokens.keep
    return _solve(associative, decay, tokens.step * tokens.x, tokens.B, extra, state)


def _chunk_backward(
    associative: bool,
    tokens: _Chunk,
    before: Inexact[Array, "b g n q"],
    dy: Float[Array, "l b g q"],
    dstate: Inexact[Array, "b g n q"],
    dfinals: Inexact[Array, "b s g n q"] | None,
):
    """Returns the cotangents of the state before the chunk, of documents' states, and of inputs."""
    x, step, A, B, C, keep, entering, documents = tokens
    u = step * x
    states = _states(associative, tokens, before)
    previous = jnp.concatenate([before[None], states[:-1]])
    if keep is not None:
        previous = previous * keep
    if documents is not None:
        previous = previous + entering
    # y = sum(state * C), real, or 2 * Re of it: its transpose in the convention of JAX.
    dy = dy[:, :, :, None] * (2 if jnp.iscomplexobj(A) else 1)

    decay = jnp.exp(step * A)
    kept = decay if keep is None else decay * keep
    extra = None
    if documents is not None:
        rows = jnp.arange(x.shape[1])[None]
        extra = jnp.where(documents.ends[..., None, None, None], dfinals[rows, documents.slot], 0)
    dstates = _solve_backward(associative, kept, dy, C, extra, dstate)
    dprevious = decay * dstates
    dlog_decay = jax.lax.optimization_barrier(dprevious * previous)

    du = _real(_sum_states(dstates, B))
    dstep = _real(_sum_states(dlog_decay, A[0, 0]))
    grads = {
        "x": du * step[:, :, :, 0],
        "step": dstep + du * x[:, :, :, 0],
        "A": jnp.sum(dlog_decay * step, axis=(0, 1)),
        "B": _sum_like(B, dstates, u),
        "C": _sum_like(C, states, dy),
    }
    dbefore = dprevious[0] if keep is None else dprevious[0] * keep[0]
    return dbefore, dprevious, grads


def _solve(
    associative: bool,
    decay: Inexact[Array, "l b g n q"],
    left: Float[Array, "l b g 1 q"],
    right: Inexact[Array, "l b g n"] | Inexact[Array, "g n q"],
    extra: Inexact[Array, "l b g n q"] | None,
    state: Inexact[Array, "b g n q"],
) -> Inexact[Array, "l b g n q"]:
    """Solves state[l] = decay[l] * state[l-1] + left[l] * right[l] + extra[l] for all l."""
    right = _spread(right, left.shape[0])
    if associative:
        driven = _drive(left, right, extra)
        driven = driven.at[0].add(decay[0] * state)
        return jax.lax.associative_scan(_join, (decay, driven))[1]

    def token(state, inputs):
        decay, *driving = inputs
        state = decay * state + _drive(*driving)
        return state, state

    # Two tokens an iteration halve the loop's own cost and still compile quickly.
    return jax.lax.scan(token, state, (decay, left, right, extra), unroll=2)[1]


def _solve_backward(
    associative: bool,
    decay: Inexact[Array, "l b g n q"],
    left: Float[Array, "l b g 1 q"],
    right: Inexact[Array, "l b g n"] | Inexact[Array, "g n q"],
    extra: Inexact[Array, "l b g n q"] | None,
    dstate: Inexact[Array, "b g n q"],
) -> Inexact[Array, "l b g n q"]:
    """Solves dstate[l] = decay[l+1] * dstate[l+1] + left[l] * right[l] + extra[l] for all l.

    The term decay[l+1] * dstate[l+1] of the last token is the given `dstate`.
    """
    right = _spread(right, left.shape[0])
    if associative:
        driven = _drive(left, right, extra).at[-1].add(dstate)
        later = jnp.concatenate([decay[1:], jnp.ones_like(decay[:1])])
        return jax.lax.associative_scan(_join, (later, driven), reverse=True)[1]

    def token(carried, inputs):
        decay, *driving = inputs
        dstate = carried + _drive(*driving)
        return decay * dstate, dstate

    xs = (decay, left, right, extra)
    return jax.lax.scan(token, dstate, xs, reverse=True, unroll=2)[1]


def _join(early: tuple[Array, Array], late: tuple[Array, Array]) -> tuple[Array, Array]:
    return early[0] * late[0], late[0] * early[1] + late[1]


def _drive(left: Array, right: Array, extra: Array | None) -> Array:
    return left * right if extra is None else left * right + extra


def _spread(
    weights: Array, length: int
) -> Inexact[Array, "l b g n 1"] | Inexact[Array, "l 1 g n q"]:
    """Gives B, C or A the axes of a chunk's states."""
    if weights.ndim == 4:
        return weights[..., None]
    return jnp.broadcast_to(weights[None, None], (length, 1, *weights.shape))


def _output(states: Inexact[Array, "l b g n q"], C: Array) -> Float[Array, "l b g q"]:
    y = _sum_states(states, C)
    return 2 * y.real if jnp.iscomplexobj(y) else y


def _sum_states(
    values: Inexact[Array, "l b g n q"],
    weights: Inexact[Array, "l b g n"] | Inexact[Array, "g n q"],
) -> Inexact[Array, "l b g q"]:
    """sum over n of values * weights."""
    if weights.ndim == 4:
        return jnp.einsum("lbgnq,lbgn->lbgq", values, weights)
    n = values.shape[3]
    if n > _MOST_STATES_WRITTEN_OUT:
        return jnp.sum(values * weights[None, None], axis=3)
    return sum(values[:, :, :, i] * weights[None, None, :, i] for i in range(n))


def _sum_like(
    weights: Inexact[Array, "l b g n"] | Inexact[Array, "g n q"],
    values: Inexact[Array, "l b g n q"],
    channels: Float[Array, "l b g 1 q"],
) -> Inexact[Array, "l b g n"] | Inexact[Array, "g n q"]:
    """values * channels, summed over the axes that `weights` lacks."""
    if weights.ndim == 4:
        return jnp.einsum("lbgnq,lbgq->lbgn", values, channels[:, :, :, 0])
    return jnp.sum(values * channels, axis=(0, 1))


def _split(inputs: Inputs) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what differs from chunk to chunk, with a leading chunk axis, and what does not."""
    values = inputs._asdict()
    constant = {"A", "initial"} | {name for name in ("B", "C") if values[name].ndim == 3}
    scanned = {name: value for name, value in values.items() if name not in constant}
    return scanned, {name: values[name] for name in constant}


def _first_states(inputs: Inputs) -> tuple[Array, Array | None]:
    """Returns the state before the first token and the documents' final states so far, zero."""
    if inputs.documents is None:
        return inputs.initial, None
    return jnp.zeros_like(inputs.initial[:, 0]), jnp.zeros_like(inputs.initial)


def _add_to_slots(
    totals: Inexact[Array, "b s g n q"],
    chosen: Bool[Array, "l b"],
    values: Inexact[Array, "l b g n q"],
    slot: Int[Array, "l b"],
) -> Inexact[Array, "b s g n q"]:
    """Adds the chosen tokens' values to their documents; at most one token of each is chosen."""
    rows = jnp.broadcast_to(jnp.arange(slot.shape[1])[None], slot.shape)
    return totals.at[rows, slot].add(jnp.where(chosen[..., None, None, None], values, 0))


def _occurs(documents: Documents, states: Inexact[Array, "b s g n q"]) -> Bool[Array, "b s 1 1 1"]:
    s = jnp.arange(states.shape[1])[None, None, None]
    found = jnp.any(documents.ends[..., None] & (documents.slot[..., None] == s), axis=(0, 1))
    return found[..., None, None, None]


def _real(values: Array) -> Array:
    return values.real if jnp.iscomplexobj(values) else values


run.defvjp(_forward, _backward)
