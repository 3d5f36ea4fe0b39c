# SPDX-License-Identifier: Apache-2.0
"""The token embedding."""

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_jax.array_types import Array, Float, Int
from mamba_jax.parameters import parameter
from mamba_jax.partitioning.tensor_parallel import vocab_parallel_lookup


class VocabParallelEmbedding(nnx.Module):
    """Token embedding, its vocabulary cut over the tensor axis under a mesh.

    Args:
      num_embeddings, features: Rows v and columns d; the tensor axis must divide the rows.
      std: Standard deviation of the initial values, N(0, std²).
      rngs, param_dtype: Source of the initial values; dtype of the stored table.
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        std: float = 0.02,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype = jnp.float32,
    ):
        draw = jax.random.normal(rngs.params(), (num_embeddings, features), param_dtype)
        self.weight = parameter(draw * std, ("vocab", "embed"), weight_decay=True)

    def __call__(
        self, ids: Int[Array, "b t"], dtype: jnp.dtype | None = None
    ) -> Float[Array, "b t d"]:
        """Looks tokens up; an id outside the table gives NaN, never another token's row."""
        weight = self.weight[...]
        return vocab_parallel_lookup(ids, weight.astype(dtype or weight.dtype))
