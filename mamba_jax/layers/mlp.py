# SPDX-License-Identifier: Apache-2.0
"""The gated MLP that may follow a mixer."""

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_jax.array_types import Array, Float
from mamba_jax.layers.linear import Linear, SplitLinear

_MULTIPLE = 128


class GatedMLP(nnx.Module):
    """y = fc2(value · silu(gate)) with (value, gate) = fc1(x).

    Args:
      features: d_model.
      hidden_features: Width, rounded up to a multiple of 128.
      rngs, dtype, param_dtype: As for Linear.
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        rngs: nnx.Rngs,
        dtype: jnp.dtype | None = None,
        param_dtype: jnp.dtype = jnp.float32,
    ):
        hidden = -(-hidden_features // _MULTIPLE) * _MULTIPLE
        options = {"bias": False, "rngs": rngs, "dtype": dtype, "param_dtype": param_dtype}
        pieces = {"value": (hidden, "mlp"), "gate": (hidden, "mlp")}
        self.fc1 = SplitLinear(features, pieces, **options)
        self.fc2 = Linear(hidden, features, ("mlp", "embed"), **options)

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Applies the MLP to every token."""
        hidden = self.fc1(x)
        return self.fc2(hidden["value"] * jax.nn.silu(hidden["gate"]))
