# SPDX-License-Identifier: Apache-2.0
"""The language model: embedding, a stack of residual blocks, a norm, a head."""

from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_jax.array_types import Array, Float, Int
from mamba_jax.block import Block
from mamba_jax.cache import LayerCache, ModelCache, init_cache
from mamba_jax.config import MambaConfig
from mamba_jax.layers.embedding import VocabParallelEmbedding
from mamba_jax.layers.linear import Linear
from mamba_jax.layers.norms import AddNorm
from mamba_jax.partitioning.tensor_parallel import column_parallel


class MambaLMHeadModel(nnx.Module):
    """A Mamba language model: logits of the next token at every position.

    Mirrors mamba_ssm's `MambaLMHeadModel`. Layers of one kind that follow each other are stacked
    (one array per parameter, layers on axis 0) and scanned over, so that compile time does not grow
    with depth.

    Args:
      config: The architecture.
      rngs: Source of the initial values.
      dtype: Compute dtype (e.g. bfloat16); `param_dtype` when None.
      param_dtype: Dtype of the stored weights; A_log, D and dt biases are always fp32.
      implementation: Which implementation of the operations; None for the best.
      remat: Whether each layer's activations are recomputed in the backward pass.
      unroll: Layers per iteration of the loop over a run of layers; True unrolls all.
    """

    def __init__(
        self,
        config: MambaConfig,
        *,
        rngs: nnx.Rngs,
        dtype: jnp.dtype | None = None,
        param_dtype: jnp.dtype = jnp.float32,
        implementation: str | None = None,
        remat: bool = False,
        unroll: int | bool = 1,
    ):
        self.config = config
        self.dtype = jnp.dtype(dtype or param_dtype)
        self.remat = remat
        self.unroll = unroll
        self.embedding = VocabParallelEmbedding(
            config.padded_vocab_size, config.d_model, rngs=rngs, param_dtype=param_dtype
        )
        block = partial(
            Block,
            config,
            dtype=self.dtype,
            param_dtype=param_dtype,
            implementation=implementation,
        )
        self.runs = nnx.List(
            [_stack(partial(block, kind), count, rngs) for kind, _, count in config.runs]
        )
        self.norm_f = AddNorm(
            config.d_model,
            rms_norm=config.rms_norm,
            eps=config.norm_eps,
            param_dtype=param_dtype,
        )
        self.lm_head = (
            None
            if config.tie_embeddings
            else Linear(
                config.d_model,
                config.padded_vocab_size,
                ("embed", "vocab"),
                bias=False,
                rngs=rngs,
                dtype=self.dtype,
                param_dtype=param_dtype,
            )
        )

    def __call__(
        self,
        input_ids: Int[Array, "b t"],
        *,
        seq_idx: Int[Array, "b t"] | None = None,
        cache: ModelCache | None = None,
        last_only: bool = False,
    ) -> Float[Array, "b t v"] | tuple[Float[Array, "b t v"], ModelCache]:
        """Computes the logits of the next token.

        Args:
          input_ids: (b, t), int32, t >= 1. With a cache any t continues from it: a prompt in
            pieces, several tokens at once, or one token.
          seq_idx: (b, t), int32. Document of each token in a packed row: nothing passes from one
            document to another. Negative marks padding, whose logits mean nothing.
          cache: State after what came before; from `init_cache`, or an earlier call.
          last_only: Whether only each row's last real token gets logits, (b, 1, v).

        Returns:
          logits: (b, t, v), compute dtype, v the padded vocabulary; with a cache, also the new
          cache.

        Raises:
          ValueError: input_ids or seq_idx have a wrong shape, t is 0, or (outside jit) an id is
            outside the vocabulary. Under jit such an id gives NaN logits.
          TypeError: input_ids are not integers.
        """
        hidden, cache_out = self.hidden_states(input_ids, seq_idx=seq_idx, cache=cache)
        if last_only:
            hidden = _last_real(hidden, seq_idx)
        logits = self.head(hidden)
        return logits if cache is None else (logits, cache_out)

    def hidden_states(
        self,
        input_ids: Int[Array, "b t"],
        *,
        seq_idx: Int[Array, "b t"] | None = None,
        cache: ModelCache | None = None,
    ) -> tuple[Float[Array, "b t d"], ModelCache | None]:
        """Returns what the head reads, after the final norm, and the new cache (or None).

        A loss over a long sequence calls this and `head` on a few tokens at a time, so that the
        logits of the whole sequence never exist. Arguments and errors as for `__call__`.
        """
        self._check(input_ids, seq_idx)
        if seq_idx is not None:
            input_ids = jnp.where(seq_idx < 0, 0, input_ids)
        hidden = self.embedding(input_ids, self.dtype)
        residual_dtype = jnp.float32 if self.config.residual_in_fp32 else self.dtype
        residual = jnp.zeros(hidden.shape, residual_dtype)
        new_layers = []
        for index, run in enumerate(self.runs):
            run_cache = None if cache is None else cache.layers[index]
            hidden, residual, run_cache = self._run(run, hidden, residual, seq_idx, run_cache)
            new_layers.append(run_cache)
        hidden, _ = self.norm_f(hidden, residual, residual_dtype)
        if cache is None:
            return hidden, None
        if seq_idx is None:
            seen = input_ids.shape[1]
        else:
            seen = jnp.sum(seq_idx >= 0, axis=1, dtype=jnp.int32)
        return hidden, ModelCache(tuple(new_layers), cache.num_tokens + seen)

    def head(self, hidden: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        """Maps final hidden states to logits over the padded vocabulary, in the compute dtype."""
        if self.lm_head is not None:
            return self.lm_head(hidden)
        kernel = self.embedding.weight[...].astype(hidden.dtype).T
        return column_parallel(hidden, {"logits": kernel}, {"logits": "vocab"})["logits"]

    def head_kernel(self) -> Float[Array, "d v"]:
        """Returns the head's weights as stored: what a loss that makes its own logits needs."""
        if self.lm_head is not None:
            return self.lm_head.kernel[...]
        return self.embedding.weight[...].T

    def init_cache(
        self,
        batch: int,
        max_length: int | None = None,
        state_dtype: jnp.dtype = jnp.float32,
    ) -> ModelCache:
        """Returns the cache of a model that has seen nothing; see `mamba_jax.init_cache`."""
        return init_cache(self.config, batch, max_length, state_dtype)

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Any) -> Self:
        """Loads a published checkpoint; see `mamba_jax.checkpoint.pretrained.from_pretrained`."""
        from mamba_jax.checkpoint import pretrained

        return pretrained.from_pretrained(path, **options)

    def save_pretrained(self, path: str | Path, *, format: str = "state-spaces") -> None:
        """Writes a checkpoint; see `mamba_jax.checkpoint.pretrained.save_pretrained`."""
        from mamba_jax.checkpoint import pretrained

        pretrained.save_pretrained(self, path, format=format)

    def _run(
        self,
        run: Block,
        hidden: Float[Array, "b t d"],
        residual: Float[Array, "b t d"],
        seq_idx: Int[Array, "b t"] | None,
        cache: LayerCache | None,
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b t d"], LayerCache | None]:
        def layer(carry, block_and_cache):
            block, layer_cache = block_and_cache
            *carry, layer_cache = block(*carry, seq_idx=seq_idx, cache=layer_cache)
            return tuple(carry), layer_cache

        body = jax.checkpoint(layer) if self.remat else layer
        (hidden, residual), cache = jax.lax.scan(
            body, (hidden, residual), (run, cache), unroll=self.unroll
        )
        return hidden, residual, cache

    def _check(self, input_ids: Array, seq_idx: Array | None) -> None:
        shape = getattr(input_ids, "shape", ())
        if len(shape) != 2 or 0 in shape:
            raise ValueError(
                f"input_ids must have shape (b, t) with b >= 1 and t >= 1; got {tuple(shape)}"
            )
        if not jnp.issubdtype(input_ids.dtype, jnp.integer):
            raise TypeError(f"input_ids must be integers; got {input_ids.dtype}")
        if seq_idx is not None and seq_idx.shape != shape:
            raise ValueError(
                f"seq_idx must have the shape of input_ids, {tuple(shape)}; got {seq_idx.shape}"
            )
        if isinstance(input_ids, jax.core.Tracer) or isinstance(seq_idx, jax.core.Tracer):
            return
        ids = np.asarray(input_ids)
        outside = (ids < 0) | (ids >= self.config.padded_vocab_size)
        if seq_idx is not None:
            outside &= np.asarray(seq_idx) >= 0
        if outside.any():
            row, column = (int(i[0]) for i in np.nonzero(outside))
            raise ValueError(
                f"input_ids must be in 0 ... {self.config.padded_vocab_size - 1}; "
                f"got {ids[row, column]} at [{row}, {column}]"
            )


def _stack(make_block, count: int, rngs: nnx.Rngs) -> Block:
    """Makes `count` blocks as one whose parameters have a leading axis of layers."""
    return jax.vmap(lambda key: make_block(rngs=nnx.Rngs(key)))(
        jax.random.split(rngs.params(), count)
    )


def _last_real(hidden: Float[Array, "b t d"], seq_idx: Int[Array, "b t"] | None) -> Array:
    if seq_idx is None:
        return hidden[:, -1:]
    time = jnp.arange(seq_idx.shape[1], dtype=jnp.int32)[None, :]
    last = jnp.max(jnp.where(seq_idx >= 0, time, 0), axis=1)
    return jnp.take_along_axis(hidden, last[:, None, None], axis=1)
