# SPDX-License-Identifier: Apache-2.0
"""The state a model carries from one call to the next, as plain pytrees.

A mixer's state does not grow with the number of tokens seen; only attention layers (hybrids) hold
one row per token, up to `max_length`. Caches are values: a call takes one and returns another, so
they can be kept, copied, saved and forked freely.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mamba_jax.array_types import Array, Float, Int
from mamba_jax.config import AttentionConfig, Mamba1Config, Mamba2Config, Mamba3Config, MambaConfig
from mamba_jax.partitioning.sharded_ops import Mamba3State


class Mamba1Cache(NamedTuple):
    """State of a Mamba-1 mixer: the convolution's last inputs and the scan's state."""

    conv: Float[Array, "b w-1 e"]
    ssm: Float[Array, "b e n"]


class Mamba2Cache(NamedTuple):
    """State of a Mamba-2 mixer: the last inputs of its convolutions by name; the scan's state."""

    conv: dict[str, Float[Array, "b w-1 _"]]
    ssm: Float[Array, "b h p n"]


class AttentionCache(NamedTuple):
    """State of an attention layer.

    Attributes:
      k, v: Rotated keys, and values, of the tokens seen; row `i` is the i-th real token.
      conv: Last inputs of the convolutions of q, k, v; empty without them.
      length: Real tokens seen per row.
      start: Row of `k` at which the current document begins.
    """

    k: Float[Array, "b l hkv p"]
    v: Float[Array, "b l hkv p"]
    conv: dict[str, Float[Array, "b w-1 _"]]
    length: Int[Array, " b"]
    start: Int[Array, " b"]


LayerCache = Mamba1Cache | Mamba2Cache | Mamba3State | AttentionCache


class ModelCache(NamedTuple):
    """State of a language model.

    Attributes:
      layers: One cache per run of equal layers (`MambaConfig.runs`); every array has the run's
        layers on axis 0 and the batch on axis 1.
      num_tokens: Real tokens seen per row.
    """

    layers: tuple[LayerCache, ...]
    num_tokens: Int[Array, " b"]


def init_cache(
    config: MambaConfig,
    batch: int,
    max_length: int | None = None,
    state_dtype: jnp.dtype = jnp.float32,
) -> ModelCache:
    """Returns the cache of a model that has seen nothing.

    Args:
      config: The model.
      batch: Rows b.
      max_length: Most tokens per row, prompt included; only attention layers need it.
      state_dtype: Dtype of the scans' states and of the convolutions' and attention's rows.

    Raises:
      ValueError: batch below 1; max_length missing for a model with attention layers.
    """
    if batch < 1:
        raise ValueError(f"init_cache: batch must be at least 1; got {batch}")
    if config.attention is not None and max_length is None:
        raise ValueError(
            "init_cache: max_length must be given for a model with attention layers "
            f"(attn_layer_idx={list(config.attn_layer_idx)}); got None"
        )
    layers = []
    for kind, _, count in config.runs:
        one = layer_cache(
            config.attention if kind == "attention" else config.mixer,
            batch,
            max_length=max_length,
            state_dtype=state_dtype,
        )
        layers.append(jax.tree.map(partial(_repeat, count), one))
    return ModelCache(tuple(layers), jnp.zeros((batch,), jnp.int32))


def layer_cache(
    config: Mamba1Config | Mamba2Config | Mamba3Config | AttentionConfig,
    batch: int,
    *,
    max_length: int | None = None,
    state_dtype: jnp.dtype = jnp.float32,
) -> LayerCache:
    """Returns the empty cache of one layer; arguments as for `init_cache`."""

    def zeros(*shape: int) -> Array:
        return jnp.zeros((batch, *shape), state_dtype)

    match config:
        case Mamba1Config():
            conv = zeros(config.d_conv - 1, config.d_inner)
            return Mamba1Cache(conv, zeros(config.d_inner, config.d_state))
        case Mamba2Config():
            shared = config.ngroups * config.d_state
            channels = {"x": config.d_ssm_inner, "B": shared, "C": shared}
            return Mamba2Cache(
                {name: zeros(config.d_conv - 1, size) for name, size in channels.items()},
                zeros(config.nheads, config.headdim, config.d_state),
            )
        case Mamba3Config():
            # The angle is always fp32: it accumulates over the whole sequence.
            return Mamba3State(
                angle=jnp.zeros((batch, config.nheads, config.num_angles), jnp.float32),
                ssm=zeros(config.nheads, config.headdim, config.d_state),
                B=zeros(config.rank, config.nheads, config.d_state),
                x=zeros(config.nheads, config.headdim),
            )
        case AttentionConfig():
            kv = (config.nheads_kv, config.headdim)
            sizes = {"q": config.num_heads, "k": config.nheads_kv, "v": config.nheads_kv}
            conv = {name: zeros(config.d_conv - 1, n * config.headdim) for name, n in sizes.items()}
            return AttentionCache(
                k=zeros(max_length, *kv),
                v=zeros(max_length, *kv),
                conv=conv if config.d_conv else {},
                length=jnp.zeros((batch,), jnp.int32),
                start=jnp.zeros((batch,), jnp.int32),
            )


def _repeat(count: int, array: Array) -> Array:
    return jnp.broadcast_to(array[None], (count, *array.shape))
