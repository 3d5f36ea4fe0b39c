# SPDX-License-Identifier: Apache-2.0
"""One residual block: add, norm, mix; then add, norm, MLP when the model has one.

The residual stream's dtype is decided here and nowhere else.
"""

import dataclasses
import math

import jax.numpy as jnp
from flax import nnx

from mamba_jax.array_types import Array, Float, Int
from mamba_jax.cache import LayerCache
from mamba_jax.config import MambaConfig
from mamba_jax.layers.attention import MHA
from mamba_jax.layers.linear import Linear
from mamba_jax.layers.mlp import GatedMLP
from mamba_jax.layers.norms import AddNorm
from mamba_jax.mixers.mamba import Mamba
from mamba_jax.mixers.mamba2 import Mamba2
from mamba_jax.mixers.mamba3 import Mamba3

_MIXERS = {"Mamba1": Mamba, "Mamba2": Mamba2, "Mamba3": Mamba3}


class Block(nnx.Module):
    """Add → norm → mixer (→ add → norm → MLP), as mamba_ssm's `Block`.

    Args:
      config: The model.
      kind: "attention", "Mamba1", "Mamba2" or "Mamba3".
      rngs, dtype, param_dtype, implementation: As for the mixers.
    """

    def __init__(
        self,
        config: MambaConfig,
        kind: str,
        *,
        rngs: nnx.Rngs,
        dtype: jnp.dtype | None = None,
        param_dtype: jnp.dtype = jnp.float32,
        implementation: str | None = None,
    ):
        types = {"dtype": dtype, "param_dtype": param_dtype}
        norm = {
            "rms_norm": config.rms_norm,
            "eps": config.norm_eps,
            "param_dtype": param_dtype,
        }
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = AddNorm(config.d_model, **norm)
        if kind == "attention":
            self.mixer = MHA(config.attention, rngs=rngs, implementation=implementation, **types)
        else:
            options = dataclasses.asdict(config.mixer)
            self.mixer = _MIXERS[kind](rngs=rngs, implementation=implementation, **types, **options)
        width = config.d_intermediate
        self.norm2 = AddNorm(config.d_model, **norm) if width else None
        self.mlp = GatedMLP(config.d_model, width, rngs=rngs, **types) if width else None
        _scale_for_depth(self, config.n_layer)

    def __call__(
        self,
        hidden: Float[Array, "b t d"],
        residual: Float[Array, "b t d"],
        *,
        seq_idx: Int[Array, "b t"] | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b t d"], LayerCache | None]:
        """Runs the block; returns its output (not yet added), the residual stream, the cache."""
        residual_dtype = jnp.float32 if self.residual_in_fp32 else hidden.dtype
        x, residual = self.norm(hidden, residual, residual_dtype)
        if cache is None:
            hidden = self.mixer(x, seq_idx=seq_idx)
        else:
            hidden, cache = self.mixer(x, seq_idx=seq_idx, cache=cache)
        if self.mlp is not None:
            x, residual = self.norm2(hidden, residual, residual_dtype)
            hidden = self.mlp(x)
        return hidden, residual, cache


def _scale_for_depth(block: Block, n_layer: int) -> None:
    """Applies the language model's initialisation to a block.

    Projections back into the residual stream shrink by sqrt(n_layer), so that its variance does not
    grow with depth (also with an MLP: the original's divisor is sqrt(n_layer) there too). Linear
    biases start at zero, except the dt bias, which was drawn on purpose.
    """
    for path, module in nnx.iter_modules(block):
        if not isinstance(module, Linear):
            continue
        if path[-1] in ("out_proj", "out_proj_mlp", "fc2"):
            module.kernel[...] = module.kernel[...] / math.sqrt(n_layer)
        if module.bias is not None and path[-1] != "dt_proj":
            module.bias[...] = jnp.zeros_like(module.bias[...])
