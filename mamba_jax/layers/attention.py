# SPDX-License-Identifier: Apache-2.0
"""The attention layer of hybrid models: grouped queries, rotary, causal, with a short convolution.

Mirrors mamba_ssm's MHA, with its defects left out: the cache keeps what went into the convolution,
documents packed in a row do not see each other, and prompts of unequal length can be padded.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_jax.array_types import Array, Bool, Float, Int
from mamba_jax.cache import AttentionCache, layer_cache
from mamba_jax.config import AttentionConfig
from mamba_jax.layers.conv import SplitCausalConv1d
from mamba_jax.layers.linear import Linear, SplitLinear
from mamba_jax.layers.rotary import apply_rotary
from mamba_jax.partitioning.sharded_ops import resolve


class _Places(NamedTuple):
    """Where each token of a call stands.

    Attributes:
      is_real: Not padding.
      ordinal: Index among the real tokens the row has ever seen; -1 for padding.
      start: Ordinal of the first token of the token's document.
    """

    is_real: Bool[Array, "b t"]
    ordinal: Int[Array, "b t"]
    start: Int[Array, "b t"]


class MHA(nnx.Module):
    """Multi-head attention with grouped key/value heads.

    Args:
      config: Options; see AttentionConfig.
      rngs, dtype, param_dtype: As for Linear.
      implementation: Which implementation of the convolution; None for the best.
    """

    def __init__(
        self,
        config: AttentionConfig,
        *,
        rngs: nnx.Rngs,
        dtype: jnp.dtype | None = None,
        param_dtype: jnp.dtype = jnp.float32,
        implementation: str | None = None,
    ):
        self.config = config
        options = {"rngs": rngs, "dtype": dtype, "param_dtype": param_dtype}
        qkv = {
            "q": (config.num_heads * config.headdim, f"heads:{config.num_heads}"),
            "k": (config.nheads_kv * config.headdim, f"heads:{config.nheads_kv}"),
            "v": (config.nheads_kv * config.headdim, f"heads:{config.nheads_kv}"),
        }
        mlp = {"mlp_up": (config.d_mlp, "mlp"), "mlp_gate": (config.d_mlp, "mlp")}
        pieces = qkv | mlp if config.d_mlp else qkv
        self.in_proj = SplitLinear(config.d_model, pieces, bias=config.qkv_proj_bias, **options)
        self.conv1d = (
            SplitCausalConv1d(
                qkv,
                config.d_conv,
                bias=True,
                activation=None,
                rngs=rngs,
                param_dtype=param_dtype,
                implementation=implementation,
            )
            if config.d_conv
            else None
        )
        self.out_proj = Linear(
            config.num_heads * config.headdim,
            config.d_model,
            ("heads", "embed"),
            bias=config.out_proj_bias,
            **options,
        )
        self.out_proj_mlp = (
            Linear(config.d_mlp, config.d_model, ("mlp", "embed"), bias=False, **options)
            if config.d_mlp
            else None
        )

    def init_cache(
        self, batch: int, max_length: int, dtype: jnp.dtype = jnp.float32
    ) -> AttentionCache:
        """Returns the cache of a layer that has seen nothing."""
        return layer_cache(self.config, batch, max_length=max_length, state_dtype=dtype)

    def __call__(
        self,
        u: Float[Array, "b t d"],
        *,
        seq_idx: Int[Array, "b t"] | None = None,
        cache: AttentionCache | None = None,
    ) -> Float[Array, "b t d"] | tuple[Float[Array, "b t d"], AttentionCache]:
        """Attends within each document of each row.

        Args:
          u: (b, t, d). Input.
          seq_idx: (b, t), int32. Document of each token; negative for padding (output 0).
          cache: What came before; the first document of each row continues it.

        Returns:
          y: (b, t, d); with a cache, also the new cache. Tokens beyond the cache's max_length
          come out as NaN, which spreads to their whole row in later layers.

        Raises:
          ValueError: a cache is given and the layer is not causal.
        """
        if cache is not None and not self.config.causal:
            raise ValueError("MHA: causal must be True to use a cache; got False")
        pieces = self.in_proj(u)
        conv_states = None if cache is None else cache.conv
        if self.conv1d is not None:
            convolved, conv_states = self.conv1d(pieces, seq_idx=seq_idx, states=conv_states)
            pieces |= convolved
        places = _places(u.shape[:2], seq_idx, cache)
        y, cache = self._attend(pieces, places, seq_idx, cache, conv_states)
        y = jnp.where(places.is_real[..., None], y, 0)
        y = self.out_proj(y)
        if self.out_proj_mlp is not None:
            y = y + self.out_proj_mlp(pieces["mlp_up"] * jax.nn.silu(pieces["mlp_gate"]))
        y = jnp.where(places.is_real[..., None], y, 0)
        return y if cache is None else (y, cache)

    def _attend(
        self,
        pieces: dict[str, Array],
        places: _Places,
        seq_idx: Int[Array, "b t"] | None,
        cache: AttentionCache | None,
        conv_states: dict[str, Array] | None,
    ) -> tuple[Float[Array, "b t e"], AttentionCache | None]:
        config = self.config
        heads = {"q": config.num_heads, "k": config.nheads_kv, "v": config.nheads_kv}
        q, k, v = (
            pieces[name].reshape(*pieces[name].shape[:2], count, config.headdim)
            for name, count in heads.items()
        )
        if config.rotary_emb_dim:
            rotary = {"base": config.rotary_emb_base, "interleaved": config.rotary_emb_interleaved}
            position = places.ordinal - places.start
            q = apply_rotary(q, position, config.rotary_emb_dim, **rotary)
            k = apply_rotary(k, position, config.rotary_emb_dim, **rotary)
        scale = config.softmax_scale or config.headdim**-0.5
        if cache is None and seq_idx is None:
            y = jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=config.causal)
            return y.reshape(*y.shape[:2], -1), None
        key_ordinal = places.ordinal
        if cache is not None:
            cache = _append(cache, k, v, conv_states, places)
            k, v = cache.k.astype(q.dtype), cache.v.astype(q.dtype)
            rows = jnp.arange(k.shape[1], dtype=jnp.int32)
            key_ordinal = jnp.where(rows[None, :] < cache.length[:, None], rows[None, :], -1)
        visible = key_ordinal[:, None, :] >= places.start[:, :, None]
        if config.causal:
            visible &= key_ordinal[:, None, :] <= places.ordinal[:, :, None]
        else:
            visible &= _last_of_document(places)[:, :, None] >= key_ordinal[:, None, :]
        y = jax.nn.dot_product_attention(q, k, v, mask=visible[:, None], scale=scale)
        y = y.reshape(*y.shape[:2], -1)
        if cache is not None:
            # A token that found no room in the cache must not look like a result.
            y = jnp.where(places.ordinal[..., None] < k.shape[1], y, jnp.nan)
        return y, cache


def _places(
    shape: tuple[int, int], seq_idx: Int[Array, "b t"] | None, cache: AttentionCache | None
) -> _Places:
    batch, time = shape
    seen = jnp.zeros((batch,), jnp.int32) if cache is None else cache.length
    first = jnp.zeros((batch,), jnp.int32) if cache is None else cache.start
    if seq_idx is None:
        ordinal = seen[:, None] + jnp.arange(time, dtype=jnp.int32)[None, :]
        return _Places(jnp.ones(shape, bool), ordinal, jnp.broadcast_to(first[:, None], shape))
    packing = resolve(seq_idx)
    real_before = jnp.cumsum(packing.is_real, axis=1, dtype=jnp.int32) - packing.is_real
    ordinal = seen[:, None] + real_before
    start = jnp.where(packing.document == 0, first[:, None], ordinal - packing.position)
    return _Places(packing.is_real, jnp.where(packing.is_real, ordinal, -1), start)


def _last_of_document(places: _Places) -> Int[Array, "b t"]:
    same = (places.start[:, :, None] == places.start[:, None, :]) & places.is_real[:, None, :]
    return jnp.max(jnp.where(same, places.ordinal[:, None, :], -1), axis=-1)


def _append(
    cache: AttentionCache,
    k: Float[Array, "b t hkv p"],
    v: Float[Array, "b t hkv p"],
    conv_states: dict[str, Array] | None,
    places: _Places,
) -> AttentionCache:
    rows = jnp.arange(k.shape[0])[:, None]
    # Padding goes to a row that does not exist, where the write is dropped.
    target = jnp.where(places.is_real, places.ordinal, cache.k.shape[1])
    return AttentionCache(
        k=cache.k.at[rows, target].set(k.astype(cache.k.dtype), mode="drop"),
        v=cache.v.at[rows, target].set(v.astype(cache.v.dtype), mode="drop"),
        conv={name: s.astype(cache.conv[name].dtype) for name, s in (conv_states or {}).items()},
        length=cache.length + jnp.sum(places.is_real, axis=1, dtype=jnp.int32),
        start=places.start[:, -1],
    )
