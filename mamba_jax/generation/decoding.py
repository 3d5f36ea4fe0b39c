# SPDX-License-Identifier: Apache-2.0
"""What runs compiled on the device: the prompt in pieces, the first token, the loop over tokens.

`decode` is one `lax.while_loop` from a GenerationState to a GenerationState. It runs to the end, or
to a given step, so that streaming calls the same compiled function several times. The functions are
compiled once per shape and set of `Options` and kept; the numbers in `Sampling` are traced.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_jax.array_types import Array, Bool, Float, Int
from mamba_jax.cache import ModelCache
from mamba_jax.generation.sampling import Sampling, keep_vocabulary, penalize_repetition, pick


class GenerationState(NamedTuple):
    """What the loop carries from token to token.

    Attributes:
      step: Tokens generated, the same for every row; finished rows receive padding.
      token: Each row's newest token; the model has not read it yet.
      tokens: The tokens generated, columns from `step` on not yet filled.
      num_new: Tokens per row up to and including its end token.
      done: Rows that have ended.
      keys: A random key per row; step i draws with `fold_in(key, i)`.
      cache: The model's state after everything but `token`.
      seen: Token ids that occurred in the prompt or since; None when nobody asks.
      scores: The model's logits before any processing; None unless wanted.
      teacher: Tokens to use instead of drawn ones, -1 where free; None when there are none.
    """

    step: Int[Array, ""]
    token: Int[Array, " b"]
    tokens: Int[Array, "b n"]
    num_new: Int[Array, " b"]
    done: Bool[Array, " b"]
    keys: Array
    cache: ModelCache
    seen: Bool[Array, "b v"] | None
    scores: Float[Array, "b n v"] | None
    teacher: Int[Array, "b n"] | None


LogitsProcessor = Callable[[Float[Array, "b v"], GenerationState], Float[Array, "b v"]]


@dataclasses.dataclass(frozen=True)
class Options:
    """What is compiled into the loop.

    Attributes:
      vocab_size: Ids from here on are never picked.
      top_k: See `sampling.pick`.
      eos_ids: Tokens that end a row.
      pad_id: What ended rows emit.
      processors: Applied to the logits after the repetition penalty, in order.
      freeze_done: Whether the cache of an ended row stays as it was. Costs a pass over the cache.
    """

    vocab_size: int
    top_k: int
    eos_ids: tuple[int, ...]
    pad_id: int
    processors: tuple[LogitsProcessor, ...]
    freeze_done: bool


@partial(jax.jit, static_argnames="graph", donate_argnames="cache")
def prefill(
    graph: nnx.GraphDef,
    params: nnx.State,
    ids: Int[Array, "b t"],
    seq_idx: Int[Array, "b t"] | None,
    cache: ModelCache,
) -> tuple[Float[Array, "b v"], ModelCache]:
    """Reads a piece of the prompts; returns the logits after its last column and the new cache."""
    model = nnx.merge(graph, params)
    logits, cache = model(ids, seq_idx=seq_idx, cache=cache, last_only=True)
    return logits[:, 0].astype(jnp.float32), cache


@partial(jax.jit, static_argnames="options", donate_argnames="state")
def begin(
    state: GenerationState, logits: Float[Array, "b v"], sampling: Sampling, options: Options
) -> GenerationState:
    """Picks the first token, from the logits after the prompt."""
    return _advance(state, logits, sampling, options)


@partial(jax.jit, static_argnames=("graph", "options"), donate_argnames="state")
def decode(
    graph: nnx.GraphDef,
    params: nnx.State,
    state: GenerationState,
    stop_at: Int[Array, ""],
    sampling: Sampling,
    options: Options,
) -> GenerationState:
    """Generates until step `stop_at`, or until every row is done."""
    model = nnx.merge(graph, params)

    def goes_on(state: GenerationState) -> Bool[Array, ""]:
        return (state.step < stop_at) & ~jnp.all(state.done)

    def one_token(state: GenerationState) -> GenerationState:
        logits, cache = model(state.token[:, None], cache=state.cache)
        if options.freeze_done:
            cache = _keep_rows(state.done, state.cache, cache)
        state = state._replace(cache=cache)
        return _advance(state, logits[:, 0].astype(jnp.float32), sampling, options)

    return jax.lax.while_loop(goes_on, one_token, state)


def _advance(
    state: GenerationState, logits: Float[Array, "b v"], sampling: Sampling, options: Options
) -> GenerationState:
    """Picks each row's next token and writes it down."""
    step = state.step
    scores = state.scores
    if scores is not None:
        scores = jax.lax.dynamic_update_slice_in_dim(scores, logits[:, None], step, axis=1)
    logits = keep_vocabulary(logits, options.vocab_size)
    if sampling.repetition_penalty is not None:
        logits = penalize_repetition(logits, state.seen, sampling.repetition_penalty)
    for processor in options.processors:
        logits = processor(logits, state)
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(state.keys, step)
    token = pick(logits, keys, sampling, top_k=options.top_k)
    if state.teacher is not None:
        forced = jax.lax.dynamic_index_in_dim(state.teacher, step, axis=1, keepdims=False)
        token = jnp.where(forced >= 0, forced, token)
    token = jnp.where(state.done, options.pad_id, token)
    num_new = state.num_new + ~state.done
    seen = state.seen
    if seen is not None:
        rows = jnp.arange(token.shape[0])
        seen = seen.at[rows, token].max(~state.done)
    done = state.done
    for eos in options.eos_ids:
        done = done | (token == eos)
    tokens = jax.lax.dynamic_update_slice_in_dim(state.tokens, token[:, None], step, axis=1)
    return state._replace(
        step=step + 1,
        token=token,
        tokens=tokens,
        num_new=num_new,
        done=done,
        seen=seen,
        scores=scores,
    )


def _keep_rows(keep: Bool[Array, " b"], old: ModelCache, new: ModelCache) -> ModelCache:
    def select(old: Array, new: Array) -> Array:
        return jnp.where(keep.reshape((1, -1) + (1,) * (old.ndim - 2)), old, new)

    layers = jax.tree.map(select, old.layers, new.layers)
    return ModelCache(layers, jnp.where(keep, old.num_tokens, new.num_tokens))
