# SPDX-License-Identifier: Apache-2.0
"""Mamba-1, Mamba-2 and Mamba-3 for JAX: Flax NNX blocks, a language model, generation.

from flax import nnx
from mamba_jax import Mamba2

block = Mamba2(d_model=256, rngs=nnx.Rngs(0))
y = block(x)  # (b, t, 256) -> (b, t, 256)
"""

from mamba_jax.cache import init_cache
from mamba_jax.config import MambaConfig
from mamba_jax.generation.generate import generate
from mamba_jax.layers.embedding import VocabParallelEmbedding
from mamba_jax.layers.linear import ColumnParallelLinear, RowParallelLinear
from mamba_jax.mixers.mamba import Mamba
from mamba_jax.mixers.mamba2 import Mamba2
from mamba_jax.mixers.mamba3 import Mamba3
from mamba_jax.model import MambaLMHeadModel
from mamba_jax.partitioning.mesh import make_mesh
from mamba_jax.partitioning.rules import shard_model

__all__ = [
    "ColumnParallelLinear",
    "Mamba",
    "Mamba2",
    "Mamba3",
    "MambaConfig",
    "MambaLMHeadModel",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "generate",
    "init_cache",
    "make_mesh",
    "shard_model",
]
