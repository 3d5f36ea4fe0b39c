# SPDX-License-Identifier: Apache-2.0
"""Norms as modules: gated and grouped before a projection, and add-then-norm between blocks.

The operations are `pallas_kernels.rms_norm`, `add_rms_norm` and `add_layer_norm`.
"""

import jax.numpy as jnp
from flax import nnx

from mamba_jax.array_types import Array, Float
from mamba_jax.parameters import parameter
from mamba_jax.partitioning import sharded_ops


class RMSNorm(nnx.Module):
    """RMS norm over the last axis, optionally in groups and gated by silu(z).

    Args:
      features: Size of the last axis.
      axis: Its logical name.
      eps: Added to the mean square.
      group_size: Features that share statistics; None for all.
      norm_before_gate: Whether the gate multiplies the normed value or what is normed.
      param_dtype: Dtype of the stored weight.
    """

    def __init__(
        self,
        features: int,
        axis: str | None,
        *,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        param_dtype: jnp.dtype = jnp.float32,
    ):
        self.weight = parameter(jnp.ones((features,), param_dtype), (axis,), weight_decay=False)
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate

    def __call__(
        self, x: Float[Array, "*batch f"], z: Float[Array, "*batch f"] | None = None
    ) -> Float[Array, "*batch f"]:
        """Normalises x, gated by z when it is given."""
        return sharded_ops.rms_norm(
            x,
            self.weight[...],
            z=z,
            eps=self.eps,
            group_size=self.group_size,
            norm_before_gate=self.norm_before_gate,
        )


class AddNorm(nnx.Module):
    """Adds a block's output to the residual stream and normalises the sum.

    Args:
      features: d_model.
      rms_norm: RMS norm, or LayerNorm with a bias when False.
      eps: Added to the mean square or variance.
      param_dtype: Dtype of the stored weight.
    """

    def __init__(
        self,
        features: int,
        *,
        rms_norm: bool,
        eps: float = 1e-5,
        param_dtype: jnp.dtype = jnp.float32,
    ):
        self.weight = parameter(jnp.ones((features,), param_dtype), (None,), weight_decay=False)
        zeros = jnp.zeros((features,), param_dtype)
        self.bias = None if rms_norm else parameter(zeros, (None,), weight_decay=False)
        self.rms_norm = rms_norm
        self.eps = eps

    def __call__(
        self,
        x: Float[Array, "b t d"],
        residual: Float[Array, "b t d"] | None,
        residual_dtype: jnp.dtype,
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b t d"]]:
        """Returns norm(x + residual) in the dtype of x, and the sum in `residual_dtype`."""
        norm = sharded_ops.add_rms_norm if self.rms_norm else sharded_ops.add_layer_norm
        return norm(
            x,
            residual,
            self.weight[...],
            None if self.bias is None else self.bias[...],
            eps=self.eps,
            residual_dtype=residual_dtype,
        )
