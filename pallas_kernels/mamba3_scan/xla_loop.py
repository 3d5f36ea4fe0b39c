# SPDX-License-Identifier: Apache-2.0
"""The loop of the XLA path over stretches of tokens, and its backward pass.

Forward stores nothing but the state before every stretch. Backward walks the stretches in reverse,
computes each anew and takes its vector-Jacobian product, so that only one stretch's intermediate
arrays exist at a time; gradients go straight to their place in arrays like the inputs.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.mamba3_scan.xla_block import Carry, Layout, Marks, Parameters, Tokens, block


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def loop(
    layout: Layout,
    parameters: Parameters,
    states: Carry,
    tokens: Tokens,
    marks: Marks,
    slots: Int[Array, "steps b"] | None,
) -> tuple[Float[Array, "b t h p"] | Float[Array, "b t r h p"], Carry]:
    """Runs all stretches in turn.

    Args:
      layout: How tokens are cut; t is a multiple of `layout.num_tokens`.
      parameters: Shared by all tokens.
      states: State before the first stretch, or with `slots` several per row: (b, s, ...).
      tokens: Per-token arrays.
      marks: Per-token integers.
      slots: Which state each row's stretch continues; None when there is one state per row.

    Returns:
      y, in the dtype of x, and the states after all stretches.
    """
    return _forward(layout, parameters, states, tokens, marks, slots)[0]


def _forward(layout, parameters, states, tokens, marks, slots):
    num_steps = tokens.x.shape[1] // layout.num_tokens

    def step(running, inputs):
        states, y = running
        i, slot = inputs
        entering = _take(states, slot)
        window = _window(layout, (tokens, marks), i)
        y_here, leaving = block(layout, parameters, entering, *window)
        return (_put(states, slot, leaving), _write(layout, y, y_here, i)), entering

    first = _window(layout, (tokens, marks), 0)
    shape = jax.eval_shape(partial(block, layout), parameters, _take(states, _first(slots)), *first)
    y = jnp.zeros((*tokens.x.shape[:2], *shape[0].shape[2:]), tokens.x.dtype)
    (states, y), entering = jax.lax.scan(step, (states, y), (jnp.arange(num_steps), slots))
    return (y, states), (parameters, entering, tokens, marks, slots)


def _backward(layout, saved, cotangents):
    parameters, entering, tokens, marks, slots = saved
    dy, dstates = cotangents
    num_steps = tokens.x.shape[1] // layout.num_tokens

    def step(running, inputs):
        dparameters, dstates, dtokens = running
        i, slot, entering = inputs
        here, marked = _window(layout, (tokens, marks), i)
        run = partial(block, layout)
        _, pull = jax.vjp(lambda *floats: run(*floats, marked), parameters, entering, here)
        dleaving = _take(dstates, slot)
        dparameters_here, dentering, dhere = pull((_window(layout, dy, i), dleaving))
        dparameters = jax.tree.map(jnp.add, dparameters, dparameters_here)
        dtokens = jax.tree.map(lambda into, value: _write(layout, into, value, i), dtokens, dhere)
        return (dparameters, _put(dstates, slot, dentering), dtokens), None

    start = (
        jax.tree.map(jnp.zeros_like, parameters),
        dstates,
        jax.tree.map(jnp.zeros_like, tokens),
    )
    inputs = (jnp.arange(num_steps), slots, entering)
    (dparameters, dstates, dtokens), _ = jax.lax.scan(step, start, inputs, reverse=True)
    return dparameters, dstates, dtokens, None, None


loop.defvjp(_forward, _backward)


def _window(layout: Layout, arrays: Any, i: Int[Array, ""]) -> Any:
    """Stretch i of every array with a time axis."""
    size = layout.num_tokens
    return jax.tree.map(
        lambda array: jax.lax.dynamic_slice_in_dim(array, i * size, size, axis=1), arrays
    )


def _write(layout: Layout, into: Array, values: Array, i: Int[Array, ""]) -> Array:
    start = i * layout.num_tokens
    return jax.lax.dynamic_update_slice_in_dim(into, values, start, axis=1)


def _first(slots: Int[Array, "steps b"] | None) -> Int[Array, "b"] | None:
    return None if slots is None else slots[0]


def _take(states: Carry, slot: Int[Array, "b"] | None) -> Carry:
    if slot is None:
        return states
    return jax.tree.map(lambda array: array[jnp.arange(array.shape[0]), slot], states)


def _put(states: Carry, slot: Int[Array, "b"] | None, new: Carry) -> Carry:
    if slot is None:
        return new
    return jax.tree.map(
        lambda array, value: array.at[jnp.arange(array.shape[0]), slot].set(value), states, new
    )
