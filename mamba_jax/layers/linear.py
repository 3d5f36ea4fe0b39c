# SPDX-License-Identifier: Apache-2.0
"""Linear maps: one, several that read the same input, and the two parallel kinds by name.

`SplitLinear` stands where mamba_ssm packs several projections into one matrix. Each piece is a
parameter of its own, so that a mesh axis can shard heads and channels without cutting across
pieces; `pieces` keeps the packed order for import and export.

A map from the residual stream ("embed" in) is column-parallel under a mesh, one back into it
("embed" out) row-parallel; see `partitioning/tensor_parallel.py`.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx

from mamba_jax.array_types import Array, Float
from mamba_jax.parameters import Initializer, fan_in_uniform, parameter
from mamba_jax.partitioning.tensor_parallel import column_parallel, row_parallel


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
        # Vectors as wide as the residual stream stay whole: sharding them would save nothing.
        bias_axes = (None if axes[1] == "embed" else axes[1],)
        self.bias = (
            parameter(
                draw_bias(rngs.params(), (out_features,), param_dtype),
                bias_axes,
                weight_decay=False,
            )
            if bias
            else None
        )
        self.axes = axes
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*batch i"]) -> Float[Array, "*batch o"]:
        """Applies the map in the compute dtype."""
        return self.add_bias(self.project(x))

    def project(self, x: Float[Array, "*batch i"]) -> Float[Array, "*batch o"]:
        """Applies the kernel alone, for callers that add the bias elsewhere."""
        dtype = self.dtype or x.dtype
        x, kernel = x.astype(dtype), self.kernel[...].astype(dtype)
        if self.axes[0] == "embed":
            return column_parallel(x, {"y": kernel}, {"y": self.axes[1]})["y"]
        if self.axes[1] == "embed":
            return row_parallel(x, kernel, self.axes[0])
        return x @ kernel

    def add_bias(self, y: Float[Array, "*batch o"]) -> Float[Array, "*batch o"]:
        """Adds the bias, if there is one."""
        if self.bias is None:
            return y
        bias = self.bias[...].astype(y.dtype)
        return y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)


class SplitLinear(nnx.Module):
    """Several linear maps of one input, each under its own name.

    Args:
      in_features: Size of the input.
      pieces: Name → (out_features, logical name of the output axis), in the packed order.
      in_axis: Logical name of the input axis.
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
        self.in_axis = in_axis
        self.dtype = dtype
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
        maps = {name: getattr(self, name) for name, _ in self.pieces}
        if self.in_axis != "embed":
            return {name: linear(x) for name, linear in maps.items()}
        dtype = self.dtype or x.dtype
        projected = column_parallel(
            x.astype(dtype),
            {name: linear.kernel[...].astype(dtype) for name, linear in maps.items()},
            {name: linear.axes[1] for name, linear in maps.items()},
        )
        return {name: maps[name].add_bias(y) for name, y in projected.items()}


class ColumnParallelLinear(Linear):
    """y = x @ kernel + bias with the output features cut over the mesh's tensor axis.

    Args:
      in_features, out_features: Sizes; the tensor axis must divide out_features.
      bias: Whether there is a bias (cut like the output).
      rngs, dtype, param_dtype: As for Linear.

    Under a mesh the tokens of x are gathered first; y holds, on each device, its columns for every
    token. Pass it on to a `RowParallelLinear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        rngs: nnx.Rngs,
        dtype: jnp.dtype | None = None,
        param_dtype: jnp.dtype = jnp.float32,
    ):
        types = {"dtype": dtype, "param_dtype": param_dtype}
        super().__init__(
            in_features, out_features, ("embed", "inner"), bias=bias, rngs=rngs, **types
        )


class RowParallelLinear(Linear):
    """y = x @ kernel + bias with the input features cut over the mesh's tensor axis.

    Args:
      in_features, out_features: Sizes; the tensor axis must divide in_features.
      bias: Whether there is a bias; it is added once, after the devices' parts are summed.
      rngs, dtype, param_dtype: As for Linear.

    Under a mesh the devices' parts are summed and their tokens scattered in one collective.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        rngs: nnx.Rngs,
        dtype: jnp.dtype | None = None,
        param_dtype: jnp.dtype = jnp.float32,
    ):
        types = {"dtype": dtype, "param_dtype": param_dtype}
        super().__init__(
            in_features, out_features, ("inner", "embed"), bias=bias, rngs=rngs, **types
        )
