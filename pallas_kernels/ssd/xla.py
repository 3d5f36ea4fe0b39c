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
from pallas_kernels.ssd.step_size import step_size


def supports(device: devices.Device, arguments: dict) -> str | None:
    """Runs anywhere."""
    return "num_documents is not there yet" if arguments["num_documents"] else None


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
    documents = None if seq_idx is None else packing.resolve(seq_idx)
    is_real = None if documents is None else documents.is_real
    step = step_size(dt, dt_bias, dt_softplus, dt_limit, is_real, wide)
    starts = None if documents is None else documents.starts
    log_decay = chunking.bounded_log_decay(step * A.astype(wide)[None, None], starts)
    tokens = Tokens(x, step, log_decay, B, C, z, is_real)
    if D is not None:
        D = jnp.broadcast_to((D if D.ndim == 2 else D[:, None]).astype(wide), x.shape[2:])
    (b, t, h, p), n = x.shape, B.shape[3]
    state = jnp.zeros((b, h, p, n), wide) if initial_state is None else initial_state.astype(wide)
    device = devices.target_device()
    q = chunking.choose_chunk_size(device, t, chunk_size)
    k = chunking.chunks_per_block(device, -(-t // q), b * h * q * q)
    padded = jax.tree.map(lambda values: chunking.pad_time(values, k * q), tokens)
    y, state = _scan((k, q), padded, D, state)
    return y[:, :t], state


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(sizes, tokens, D, state):
    """Runs over the blocks of `tokens`, arrays (b, t, ...), t a multiple of a block."""
    return _scan_forward(sizes, tokens, D, state)[0]


def _scan_forward(sizes, tokens, D, state):
    num_blocks = tokens.x.shape[1] // (sizes[0] * sizes[1])

    def body(i, carry):
        out, y, states, state = carry
        states = states.at[i].set(state)
        new_out, new_y, state = blocks.forward(_block(tokens, i, sizes), D, state)
        return _put(out, new_out, i), None if y is None else _put(y, new_y, i), states, state

    y = None if tokens.z is None else jnp.zeros_like(tokens.x)
    states = jnp.zeros((num_blocks, *state.shape), state.dtype)
    carry = (jnp.zeros_like(tokens.x), y, states, state)
    out, y, states, state = _loop(num_blocks, body, carry)
    return (out, state), (tokens, D, y, states)


def _scan_backward(sizes, residuals, cotangents):
    tokens, D, y, states = residuals
    d_out, d_state = cotangents
    num_blocks = states.shape[0]

    def body(step, carry):
        i = num_blocks - 1 - step
        d_tokens, d_D, d_state = carry
        block_y = None if y is None else _cut(y, i, sizes)
        block = _block(tokens, i, sizes)
        new, new_d_D, d_state = blocks.backward(
            block, D, block_y, states[i], _cut(d_out, i, sizes), d_state
        )
        d_tokens = jax.tree.map(lambda values, value: _put(values, value, i), d_tokens, new)
        return d_tokens, None if D is None else d_D + new_d_D, d_state

    d_tokens = jax.tree.map(jnp.zeros_like, tokens._replace(is_real=None))
    d_D = None if D is None else jnp.zeros_like(D)
    d_tokens, d_D, d_state = _loop(num_blocks, body, (d_tokens, d_D, d_state))
    return d_tokens, d_D, d_state


_scan.defvjp(_scan_forward, _scan_backward)


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
