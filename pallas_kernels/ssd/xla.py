# SPDX-License-Identifier: Apache-2.0
"""`ssd` for any device: chunks of time as matrix products, a loop over blocks of chunks.

Owns the way from the op's arguments to one differentiable loop over time; what happens inside a
block, forward and backward, is `blocks.py`. Only the inputs and the state that enters each block
are kept for the backward pass (and y before the gate, where there is one); it goes over the blocks
in reverse and recomputes the rest. `README.md` derives the formulas.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import chunking, devices, packing
from pallas_kernels.ssd import blocks
from pallas_kernels.ssd.blocks import Tokens
from pallas_kernels.ssd.documents import align, to_places, to_tokens
from pallas_kernels.ssd.step_size import step_size


def supports(device: devices.Device, arguments: dict) -> str | None:
    """Runs anywhere."""
    return None


def run(
    x: Float[Array, "b t h p"],
    dt: Float[Array, "b t h"],
    A: Float[Array, "h"],
    B: Float[Array, "b t g n"],
    C: Float[Array, "b t g n"],
    D: Float[Array, "h"] | Float[Array, "h p"] | None,
    z: Float[Array, "b t h p"] | None,
    dt_bias: Float[Array, "h"] | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    seq_idx: Int[Array, "b t"] | None,
    initial_state: Float[Array, "b h p n"] | Float[Array, "b s h p n"] | None,
    num_documents: int | None,
    chunk_size: int | None,
) -> tuple[Float[Array, "b t h p"], Float[Array, "b h p n"] | Float[Array, "b s h p n"]]:
    """See `ssd`."""
    arrays = (x, dt, A, D, dt_bias, initial_state)
    wide = jnp.result_type(jnp.float32, *(array.dtype for array in arrays if array is not None))
    if D is not None:
        D = jnp.broadcast_to((D if D.ndim == 2 else D[:, None]).astype(wide), x.shape[2:])
    (b, t, h, p), (g, n) = x.shape, B.shape[2:]
    # A state is (b, g, n, j, p) in the loop, j the heads of a group; s documents come after b.
    rows = (b, num_documents) if num_documents else (b,)
    state = jnp.zeros((*rows, h, p, n), wide) if initial_state is None else initial_state
    state = jnp.moveaxis(state.astype(wide).reshape(*rows, g, h // g, p, n), -1, -3)
    device = devices.target_device()
    q = chunking.choose_chunk_size(device, t, chunk_size)

    documents = None if seq_idx is None else packing.resolve(seq_idx)
    is_real = None if documents is None else documents.is_real
    step = step_size(dt, dt_bias, dt_softplus, dt_limit, is_real, wide)
    starts = None if documents is None or num_documents else documents.starts
    log_decay = chunking.bounded_log_decay(step * A.astype(wide)[None, None], starts)
    tokens = Tokens(x, step, log_decay, B, C, z, is_real)
    if num_documents:
        alignment = align(seq_idx, num_documents, q)
        tokens = tokens._replace(is_real=None)
        tokens = jax.tree.map(lambda values: to_places(values, alignment), tokens)
        y, state = _scan((1, q), tokens, D, state, alignment.slot)
        return to_tokens(y, alignment), _public_state(state)
    k = chunking.chunks_per_block(device, -(-t // q), b * h * q * q)
    tokens = jax.tree.map(lambda values: chunking.pad_time(values, k * q), tokens)
    y, state = _scan((k, q), tokens, D, state, None)
    return y[:, :t], _public_state(state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(sizes, tokens, D, state, slot):
    """Runs over the blocks of `tokens`.

    Args:
      sizes: (k, q): chunks in a block and tokens in a chunk.
      tokens: Arrays (b, t, ...), t a multiple of k * q.
      D: (h, p) or None.
      state: (b, g, n, j, p), or (b, s, g, n, j, p) with `slot`.
      slot: (b, c). The state that each block, then one chunk, continues; or None.

    Returns:
      The output (b, t, h, p) and the state, or states, at the end.
    """
    return _scan_forward(sizes, tokens, D, state, slot)[0]


def _scan_forward(sizes, tokens, D, state, slot):
    num_blocks = tokens.x.shape[1] // (sizes[0] * sizes[1])

    def body(i, carry):
        out, y, before, state = carry
        entering = _pick(state, slot, i)
        before = before.at[i].set(entering)
        new_out, new_y, leaving = blocks.forward(_block(tokens, i, sizes), D, entering)
        y = None if y is None else _put(y, new_y, i)
        return _put(out, new_out, i), y, before, _replace(state, slot, i, leaving)

    y = None if tokens.z is None else jnp.zeros_like(tokens.x)
    before = jnp.zeros((num_blocks, state.shape[0], *state.shape[-4:]), state.dtype)
    out, y, before, state = _loop(num_blocks, body, (jnp.zeros_like(tokens.x), y, before, state))
    return (out, state), (tokens, D, y, before, slot)


def _scan_backward(sizes, residuals, cotangents):
    tokens, D, y, before, slot = residuals
    d_out, d_state = cotangents
    num_blocks = before.shape[0]

    def body(round_, carry):
        i = num_blocks - 1 - round_
        d_tokens, d_D, d_state = carry
        block_y = None if y is None else _cut(y, i, sizes)
        block, block_d_out = _block(tokens, i, sizes), _cut(d_out, i, sizes)
        new, new_d_D, d_entering = blocks.backward(
            block, D, block_y, before[i], block_d_out, _pick(d_state, slot, i)
        )
        d_tokens = jax.tree.map(lambda values, value: _put(values, value, i), d_tokens, new)
        d_D = None if D is None else d_D + new_d_D
        return d_tokens, d_D, _replace(d_state, slot, i, d_entering)

    d_tokens = jax.tree.map(jnp.zeros_like, tokens._replace(is_real=None))
    d_D = None if D is None else jnp.zeros_like(D)
    d_tokens, d_D, d_state = _loop(num_blocks, body, (d_tokens, d_D, d_state))
    return d_tokens, d_D, d_state, None


_scan.defvjp(_scan_forward, _scan_backward)


def _public_state(state: Float[Array, "... g n j p"]) -> Float[Array, "... h p n"]:
    *rows, g, n, j, p = state.shape
    return jnp.moveaxis(state, -3, -1).reshape(*rows, g * j, p, n)


def _loop(count, body, carry):
    """`fori_loop`; a single round is no loop, so that XLA sees through it."""
    return body(0, carry) if count == 1 else jax.lax.fori_loop(0, count, body, carry)


def _block(tokens: Tokens, i, sizes: tuple[int, int]) -> Tokens:
    return jax.tree.map(lambda values: _cut(values, i, sizes), tokens)


def _cut(values: Array, i, sizes: tuple[int, int]) -> Array:
    """Block i of (b, t, ...) as (b, k, q, ...)."""
    k, q = sizes
    block = jax.lax.dynamic_slice_in_dim(values, i * k * q, k * q, axis=1)
    return block.reshape(block.shape[0], k, q, *block.shape[2:])


def _put(values: Array, block: Array, i) -> Array:
    """Writes block i, (b, k, q, ...), into (b, t, ...)."""
    b, k, q = block.shape[:3]
    block = block.reshape(b, k * q, *block.shape[3:])
    return jax.lax.dynamic_update_slice_in_dim(values, block, i * k * q, axis=1)


def _pick(states: Array, slot: Int[Array, "b c"] | None, i) -> Float[Array, "b g n j p"]:
    """The state that block i continues."""
    if slot is None:
        return states
    return jnp.take_along_axis(states, slot[:, i].reshape(-1, *(1,) * 5), axis=1)[:, 0]


def _replace(states: Array, slot: Int[Array, "b c"] | None, i, state: Array) -> Array:
    """`states` with the one that block i continued replaced."""
    if slot is None:
        return state
    return states.at[jnp.arange(states.shape[0]), slot[:, i]].set(state, unique_indices=True)
