# SPDX-License-Identifier: Apache-2.0
"""How likely a model finds continuations of contexts, however long, in bounded memory.

A recurrent model needs no window: a text is read in pieces and the state carries everything before.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_jax.array_types import Array, Bool, Float, Int
from mamba_jax.cache import ModelCache
from mamba_jax.generation.sampling import keep_vocabulary
from mamba_jax.model import MambaLMHeadModel

Pair = tuple[Sequence[int], Sequence[int]]
_SHORTEST = 16


def log_likelihoods(
    model: MambaLMHeadModel,
    pairs: Sequence[Pair],
    *,
    batch_size: int = 8,
    chunk: int = 512,
) -> list[tuple[float, bool]]:
    """Scores continuations.

    Args:
      model: The model.
      pairs: (context ids, continuation ids); a context has at least one token.
      batch_size: Pairs read at a time.
      chunk: Tokens of each read at a time: memory does not grow beyond it.

    Returns:
      For each pair the continuation's log-likelihood (nats, summed over its tokens, over the real
      vocabulary) and whether every token of it is the most likely one.

    Raises:
      ValueError: an empty context, or an id outside the vocabulary.
    """
    vocab = model.config.vocab_size
    for index, (context, continuation) in enumerate(pairs):
        if not len(context):
            raise ValueError(f"pair {index}: the context must hold at least one token")
        ids = np.asarray([*context, *continuation])
        if ids.min() < 0 or ids.max() >= vocab:
            raise ValueError(f"pair {index}: ids must be in 0 ... {vocab - 1}; got {ids.tolist()}")
    graph, params = nnx.split(model)
    results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
    # Neighbours of like length waste little padding.
    order = sorted(range(len(pairs)), key=lambda index: -sum(map(len, pairs[index])))
    for start in range(0, len(order), batch_size):
        members = order[start : start + batch_size]
        ids, targets = _arrange([pairs[index] for index in members], batch_size, chunk)
        cache = model.init_cache(batch_size, max_length=ids.shape[1])
        total, greedy = np.zeros(batch_size), np.ones(batch_size, bool)
        for begin in range(0, ids.shape[1], chunk):
            piece = slice(begin, begin + chunk)
            nats, is_greedy, cache = _score(graph, params, ids[:, piece], targets[:, piece], cache)
            total += np.asarray(nats, np.float64)
            greedy &= np.asarray(is_greedy)
        for row, index in enumerate(members):
            results[index] = (float(total[row]), bool(greedy[row]))
    return results


@partial(jax.jit, static_argnames="graph", donate_argnames="cache")
def _score(
    graph: nnx.GraphDef,
    params: nnx.State,
    ids: Int[Array, "b t"],
    targets: Int[Array, "b t"],
    cache: ModelCache,
) -> tuple[Float[Array, " b"], Bool[Array, " b"], ModelCache]:
    """Reads a piece; sums the log-likelihood of its targets (-1: none)."""
    model = nnx.merge(graph, params)
    logits, cache = model(ids, seq_idx=jnp.where(ids < 0, -1, 0), cache=cache)
    logits = keep_vocabulary(logits.astype(jnp.float32), model.config.vocab_size)
    counts = targets >= 0
    chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    nats = jnp.where(counts, chosen - jax.nn.logsumexp(logits, axis=-1), 0)
    is_greedy = (jnp.argmax(logits, axis=-1) == targets) | ~counts
    return jnp.sum(nats, axis=1), jnp.all(is_greedy, axis=1), cache


def _arrange(pairs: Sequence[Pair], rows: int, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids to read and the target of each, (rows, t); -1 where there is none.

    t is a power of two up to `chunk`, then a multiple of it, so that few shapes are compiled.
    """
    longest = max(len(context) + len(continuation) - 1 for context, continuation in pairs)
    time = min(max(_SHORTEST, 1 << (longest - 1).bit_length()), chunk)
    time = -(-longest // time) * time
    ids, targets = np.full((2, rows, time), -1, np.int32)
    for row, (context, continuation) in enumerate(pairs):
        whole = np.asarray([*context, *continuation], np.int32)
        ids[row, : len(whole) - 1] = whole[:-1]
        targets[row, len(context) - 1 : len(whole) - 1] = continuation
    return ids, targets
