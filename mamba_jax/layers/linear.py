# SPDX-License-Identifier: Apache-2.0
"""Linear maps: one, and several that read the same input.

`SplitLinear` stands where mamba_ssm packs several projections into one matrix. Each piece is a
parameter of its own, so that a mesh axis can shard heads and channels without cutting across
pieces; `pieces` keeps the packed order for import and export.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx

from mamba_jax.array_types import Array, Float
from mamba_jax.parameters import Initializer, fan_in_uniform, parameter


class Linear(nnx.Module):
    """y = x @ kernel + bias, with a kernel of shape (in, out).

    Args:
      in_features, out_features: Sizes.
      axes: Logical names of the kernel's two axes.
      bias: Whether there is a bias.
      rngs: Source of the initial values.
      dtype: Compute dtype; that of the input when None.
      param_dtype: Dtype of the stored kernel and bias.
      kernel_init, bias_init: Initial distributions; U(±1/sqrt(in_features)) when None.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axes: tuple[str | None, str | None],
        *,
        bias: bool,
        rngs: nnx.Rngs,
        dtype: jnp.dtype | None = None,
        param_dtype: jnp.dtype = jnp.float32,
        kernel_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ):
        default = fan_in_uniform(in_features)
        kernel = (kernel_init or default)(rngs.params(), (in_features, out_features), param_dtype)
        self.kernel = parameter(kernel, axes, weight_decay=True)
        draw_bias = bias_init or default
        self.bias = (
            parameter(
                draw_bias(rngs.params(), (out_features,), param_dtype), axes[1:], weight_decay=False
            )
            if bias
            else None
        )
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*batch i"]) -> Float[Array, "*batch o"]:
        """Applies the map in the compute dtype."""
        y = self.project(x)
        if self.bias is None:
            return y
        bias = self.bias[...].astype(y.dtype)
        return y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)

    def project(self, x: Float[Array, "*batch i"]) -> Float[Array, "*batch o"]:
        """Applies the kernel alone, for callers that add the bias elsewhere."""
        dtype = self.dtype or x.dtype
        return x.astype(dtype) @ self.kernel[...].astype(dtype)


class SplitLinear(nnx.Module):
    """Several linear maps of one input, each under its own name.

    Args:
      in_features: Size of the input.
      pieces: Name → (out_features, logical name of the output axis), in the packed order.
      bias, rngs, dtype, param_dtype: As for Linear.

    Attributes:
      pieces: ((name, out_features), ...) in the packed order.
    """

    def __init__(
        self,
        in_features: int,
        pieces: Mapping[str, tuple[int, str | None]],
        *,
        in_axis: str = "embed",
        bias: bool,
        rngs: nnx.Rngs,
        dtype: jnp.dtype | None = None,
        param_dtype: jnp.dtype = jnp.float32,
    ):
        self.pieces = tuple((name, size) for name, (size, _) in pieces.items())
        for name, (size, axis) in pieces.items():
            linear = Linear(
                in_features,
                size,
                (in_axis, axis),
                bias=bias,
                rngs=rngs,
                dtype=dtype,
                param_dtype=param_dtype,
            )
            setattr(self, name, linear)

    def __call__(self, x: Float[Array, "*batch i"]) -> dict[str, Float[Array, "*batch o"]]:
        """Applies every map; the results by name."""
        return {name: getattr(self, name)(x) for name, _ in self.pieces}
