# SPDX-License-Identifier: Apache-2.0
"""From logits to the next token: pure functions over the last axis.

A filter sets the logits of tokens that must not be picked to -inf; filters therefore compose in any
order. `pick` applies the usual ones as mamba_ssm does: top-k, temperature, top-p on what top-k
left, min-p, then a draw.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mamba_jax.array_types import Array, Bool, Float, Int


class Sampling(NamedTuple):
    """How a token is drawn. None leaves a step out; numbers may be traced.

    Attributes:
      temperature: Logits are divided by it; None takes the most likely token.
      top_p: See `keep_top_p`.
      min_p: See `keep_min_p`.
      repetition_penalty: See `penalize_repetition`.
    """

    temperature: Float[Array, ""] | float | None = None
    top_p: Float[Array, ""] | float | None = None
    min_p: Float[Array, ""] | float | None = None
    repetition_penalty: Float[Array, ""] | float | None = None


def pick(
    logits: Float[Array, "b v"], keys: Array, sampling: Sampling, *, top_k: int = 0
) -> Int[Array, " b"]:
    """Picks a token per row.

    Args:
      logits: (b, v), float32.
      keys: (b,), random keys, one per row.
      sampling: What to apply; its repetition penalty is the caller's business.
      top_k: Number of most likely tokens to draw from; 0 for all, 1 for the most likely token.

    Returns:
      tokens: (b,), int32.
    """
    if sampling.temperature is None or top_k == 1:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    ids = None
    if 0 < top_k < logits.shape[-1]:
        logits, ids = jax.lax.top_k(logits, top_k)
    logits = logits / sampling.temperature
    if sampling.top_p is not None:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p is not None:
        logits = keep_min_p(logits, sampling.min_p)
    tokens = jax.vmap(jax.random.categorical)(keys, logits)
    if ids is not None:
        tokens = jnp.take_along_axis(ids, tokens[:, None], axis=-1)[:, 0]
    return tokens.astype(jnp.int32)


def keep_vocabulary(logits: Float[Array, "*b v"], vocab_size: int) -> Float[Array, "*b v"]:
    """Removes the ids that only pad the embedding's rows."""
    if vocab_size >= logits.shape[-1]:
        return logits
    ids = jnp.arange(logits.shape[-1]).reshape((1,) * (logits.ndim - 1) + (-1,))
    return jnp.where(ids < vocab_size, logits, -jnp.inf)


def keep_top_k(logits: Float[Array, "*b v"], k: int) -> Float[Array, "*b v"]:
    """Keeps the k largest logits (and whatever equals the smallest of them)."""
    if k >= logits.shape[-1]:
        return logits
    smallest = jax.lax.top_k(logits, k)[0][..., -1:]
    return jnp.where(logits >= smallest, logits, -jnp.inf)


def keep_top_p(
    logits: Float[Array, "*b v"], top_p: Float[Array, ""] | float
) -> Float[Array, "*b v"]:
    """Keeps the fewest most likely tokens whose probabilities sum to at least `top_p`.

    The token that crosses the bound is kept, and so are tokens exactly as likely as the last one.
    Source: Holtzman et al. 2020, arXiv:1904.09751, section 3.1.
    """
    probability = jax.nn.softmax(logits, axis=-1)
    ascending = jnp.sort(probability, axis=-1)
    is_kept = jnp.cumsum(ascending, axis=-1) > 1 - top_p
    smallest = jnp.min(jnp.where(is_kept, ascending, jnp.inf), axis=-1, keepdims=True)
    # With a tiny top_p rounding may leave nothing; the most likely token always stays.
    smallest = jnp.minimum(smallest, ascending[..., -1:])
    return jnp.where(probability >= smallest, logits, -jnp.inf)


def keep_min_p(
    logits: Float[Array, "*b v"], min_p: Float[Array, ""] | float
) -> Float[Array, "*b v"]:
    """Keeps the tokens at least `min_p` times as likely as the most likely one.

    Source: Nguyen et al. 2024, arXiv:2407.01082. (mamba_ssm compares with a raw logit instead.)
    """
    bound = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(min_p)
    return jnp.where(logits >= bound, logits, -jnp.inf)


def penalize_repetition(
    logits: Float[Array, "b v"], seen: Bool[Array, "b v"], penalty: Float[Array, ""] | float
) -> Float[Array, "b v"]:
    """Divides the positive logits of seen tokens by `penalty` and multiplies the negative ones.

    Once per token however often it was seen. Source: Keskar et al. 2019, arXiv:1909.05858,
    section 4.1, with the sign handled as mamba_ssm does.
    """
    penalized = jnp.where(logits < 0, logits * penalty, logits / penalty)
    return jnp.where(seen, penalized, logits)
