# SPDX-License-Identifier: Apache-2.0
"""The short causal convolution as a module; the operation is `pallas_kernels.causal_conv1d`."""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx

from mamba_jax.array_types import Array, Float, Int
from mamba_jax.parameters import Initializer, fan_in_uniform, parameter
from mamba_jax.partitioning import sharded_ops


class CausalConv1d(nnx.Module):
    """Depthwise causal convolution: y[t] = act(bias + Σ_j weight[:, j] · x[t - (w - 1) + j]).

    Args:
      channels: Channels e.
      width: Taps w; tap w-1 multiplies the current token.
      axis: Logical name of the channel axis.
      bias: Whether there is a bias.
      activation: "silu" or None.
      rngs, param_dtype: As for Linear.
      weight_init: Initial distribution of the taps; U(±1/sqrt(w)) when None.
      implementation: Which implementation of the op; None for the best.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        axis: str | None,
        *,
        bias: bool,
        activation: str | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype = jnp.float32,
        weight_init: Initializer | None = None,
        implementation: str | None = None,
    ):
        default = fan_in_uniform(width)
        weight = (weight_init or default)(rngs.params(), (channels, width), param_dtype)
        self.weight = parameter(weight, (axis, "conv"), weight_decay=True)
        self.bias = (
            parameter(default(rngs.params(), (channels,), param_dtype), (axis,), weight_decay=False)
            if bias
            else None
        )
        self.activation = activation
        self.implementation = implementation

    def __call__(
        self,
        x: Float[Array, "b t e"],
        *,
        seq_idx: Int[Array, "b t"] | None = None,
        state: Float[Array, "b w-1 e"] | None = None,
    ) -> tuple[Float[Array, "b t e"], Float[Array, "b w-1 e"]]:
        """Convolves a sequence; returns the result and the last w-1 inputs."""
        return sharded_ops.causal_conv1d(
            x,
            self.weight[...],
            None if self.bias is None else self.bias[...],
            activation=self.activation,
            seq_idx=seq_idx,
            initial_state=state,
            implementation=self.implementation,
        )

    def step(
        self, x: Float[Array, "b e"], state: Float[Array, "b w-1 e"]
    ) -> tuple[Float[Array, "b e"], Float[Array, "b w-1 e"]]:
        """Convolves one token; returns the result and the shifted state."""
        return sharded_ops.causal_conv1d_update(
            state,
            x,
            self.weight[...],
            None if self.bias is None else self.bias[...],
            activation=self.activation,
            implementation=self.implementation,
        )


class SplitCausalConv1d(nnx.Module):
    """Causal convolutions over the named pieces of a split projection.

    Args:
      pieces: Name → (channels, logical name of the channel axis), in the packed order.
      The rest: as for CausalConv1d.

    Attributes:
      pieces: ((name, channels), ...) in the packed order.
    """

    def __init__(
        self,
        pieces: Mapping[str, tuple[int, str | None]],
        width: int,
        *,
        bias: bool,
        activation: str | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype = jnp.float32,
        weight_init: Initializer | None = None,
        implementation: str | None = None,
    ):
        self.pieces = tuple((name, channels) for name, (channels, _) in pieces.items())
        for name, (channels, axis) in pieces.items():
            conv = CausalConv1d(
                channels,
                width,
                axis,
                bias=bias,
                activation=activation,
                rngs=rngs,
                param_dtype=param_dtype,
                weight_init=weight_init,
                implementation=implementation,
            )
            setattr(self, name, conv)

    def __call__(
        self,
        arrays: Mapping[str, Float[Array, "b t _"]],
        *,
        seq_idx: Int[Array, "b t"] | None = None,
        states: Mapping[str, Float[Array, "b w-1 _"]] | None = None,
    ) -> tuple[dict[str, Float[Array, "b t _"]], dict[str, Float[Array, "b w-1 _"]]]:
        """Convolves each piece; returns the results and the states by name."""
        outputs, final = {}, {}
        for name, _ in self.pieces:
            state = None if states is None else states[name]
            conv = getattr(self, name)
            outputs[name], final[name] = conv(arrays[name], seq_idx=seq_idx, state=state)
        return outputs, final

    def step(
        self,
        arrays: Mapping[str, Float[Array, "b _"]],
        states: Mapping[str, Float[Array, "b w-1 _"]],
    ) -> tuple[dict[str, Float[Array, "b _"]], dict[str, Float[Array, "b w-1 _"]]]:
        """Convolves one token of each piece; returns the results and the states by name."""
        outputs, final = {}, {}
        for name, _ in self.pieces:
            outputs[name], final[name] = getattr(self, name).step(arrays[name], states[name])
        return outputs, final
