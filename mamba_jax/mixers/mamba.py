# SPDX-License-Identifier: Apache-2.0
"""The Mamba-1 mixer: projections and convolution around `pallas_kernels.selective_scan`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_jax.array_types import Array, Float, Int
from mamba_jax.cache import Mamba1Cache, layer_cache
from mamba_jax.config import Mamba1Config
from mamba_jax.layers.conv import CausalConv1d
from mamba_jax.layers.linear import Linear, SplitLinear
from mamba_jax.parameters import constant, dt_bias, log_arange, parameter, uniform
from mamba_jax.partitioning import sharded_ops


class _ScanInputs(NamedTuple):
    dt: Array
    B: Array
    C: Array


class Mamba(nnx.Module):
    """Mamba-1: selective scan with one decay per channel and state.

        x, z = in_proj(u);  x = silu(conv(x));  dt, B, C = x_proj(x);  dt = dt_proj(dt)
        y = selective_scan(x, dt, A, B, C, D, z);  out = out_proj(y)

    Source: Gu & Dao 2023, arXiv:2312.00752, section 3.4. Mirrors mamba_ssm `Mamba`.

    Args:
      d_model: Width d of the input and output.
      rngs: Source of the initial values.
      dtype: Compute dtype; that of the input when None.
      param_dtype: Dtype of the stored weights. A_log, D and the dt bias are always fp32.
      implementation: Which implementation of the operations; None for the best.
      **options: The other fields of `Mamba1Config`: d_state=16, d_conv=4, expand=2,
        dt_rank="auto", dt_min, dt_max, dt_init, dt_scale, dt_init_floor, conv_bias, bias.

    Raises:
      ValueError: an unknown option or a bad value; the message names it.
    """

    def __init__(
        self,
        d_model: int,
        *,
        rngs: nnx.Rngs,
        dtype: jnp.dtype | None = None,
        param_dtype: jnp.dtype = jnp.float32,
        implementation: str | None = None,
        **options: Any,
    ):
        config = Mamba1Config.from_dict({**options, "d_model": d_model})
        self.config = config
        self.implementation = implementation
        d_inner, rank = config.d_inner, config.rank
        types = {"dtype": dtype, "param_dtype": param_dtype}
        self.A_log = parameter(
            log_arange()(rngs.params(), (d_inner, config.d_state), jnp.float32),
            ("inner", "state"),
            weight_decay=False,
        )
        self.D = parameter(jnp.ones((d_inner,), jnp.float32), ("inner",), weight_decay=False)
        self.in_proj = SplitLinear(
            d_model,
            {"x": (d_inner, "inner"), "z": (d_inner, "inner")},
            bias=config.bias,
            rngs=rngs,
            **types,
        )
        self.conv1d = CausalConv1d(
            d_inner,
            config.d_conv,
            "inner",
            bias=config.conv_bias,
            activation="silu",
            rngs=rngs,
            param_dtype=param_dtype,
            implementation=implementation,
        )
        self.x_proj = SplitLinear(
            d_inner,
            {"dt": (rank, None), "B": (config.d_state, None), "C": (config.d_state, None)},
            in_axis="inner",
            bias=False,
            rngs=rngs,
            **types,
        )
        scale = rank**-0.5 * config.dt_scale
        self.dt_proj = Linear(
            rank,
            d_inner,
            (None, "inner"),
            bias=True,
            kernel_init=uniform(scale) if config.dt_init == "random" else constant(scale),
            bias_init=_in_fp32(dt_bias(config.dt_min, config.dt_max, config.dt_init_floor)),
            rngs=rngs,
            **types,
        )
        self.out_proj = Linear(
            d_inner, d_model, ("inner", "embed"), bias=config.bias, rngs=rngs, **types
        )

    def init_cache(self, batch: int, dtype: jnp.dtype = jnp.float32) -> Mamba1Cache:
        """Returns the cache of a mixer that has seen nothing."""
        return layer_cache(self.config, batch, state_dtype=dtype)

    def __call__(
        self,
        u: Float[Array, "b t d"],
        *,
        seq_idx: Int[Array, "b t"] | None = None,
        cache: Mamba1Cache | None = None,
    ) -> Float[Array, "b t d"] | tuple[Float[Array, "b t d"], Mamba1Cache]:
        """Mixes a sequence.

        Args:
          u: (b, t, d). Input, t >= 1.
          seq_idx: (b, t), int32. Document of each token: states restart where it changes; negative
            for padding.
          cache: What came before; the first document of each row continues it.

        Returns:
          y: (b, t, d); with a cache, also the new cache.
        """
        if cache is not None and u.shape[1] == 1 and seq_idx is None:
            y, cache = self.step(u[:, 0], cache)
            return y[:, None], cache
        projected = self.in_proj(u)
        conv_state = None if cache is None else cache.conv.astype(projected["x"].dtype)
        x, conv_state = self.conv1d(projected["x"], seq_idx=seq_idx, state=conv_state)
        inputs = self._scan_inputs(x)
        y, ssm_state = sharded_ops.selective_scan(
            x,
            inputs.dt,
            self._A(),
            inputs.B,
            inputs.C,
            self.D[...],
            z=projected["z"],
            dt_bias=self.dt_proj.bias[...],
            dt_softplus=True,
            seq_idx=seq_idx,
            initial_state=None if cache is None else cache.ssm.astype(jnp.float32),
            implementation=self.implementation,
        )
        y = self.out_proj(y)
        if cache is None:
            return y
        return y, Mamba1Cache(
            conv_state.astype(cache.conv.dtype), ssm_state.astype(cache.ssm.dtype)
        )

    def step(
        self, u: Float[Array, "b d"], cache: Mamba1Cache
    ) -> tuple[Float[Array, "b d"], Mamba1Cache]:
        """Mixes one token; the same function as `__call__` on a sequence of one."""
        projected = self.in_proj(u)
        conv_state = cache.conv.astype(projected["x"].dtype)
        x, conv_state = self.conv1d.step(projected["x"], conv_state)
        inputs = self._scan_inputs(x)
        y, ssm_state = sharded_ops.selective_state_update(
            cache.ssm,
            x,
            inputs.dt,
            self._A(),
            inputs.B,
            inputs.C,
            self.D[...],
            z=projected["z"],
            dt_bias=self.dt_proj.bias[...],
            dt_softplus=True,
            implementation=self.implementation,
        )
        return self.out_proj(y), Mamba1Cache(conv_state.astype(cache.conv.dtype), ssm_state)

    def _A(self) -> Float[Array, "e n"]:
        return -jnp.exp(self.A_log[...].astype(jnp.float32))

    def _scan_inputs(self, x: Float[Array, "*bt e"]) -> _ScanInputs:
        low = self.x_proj(x)
        if (eps := self.config.bcdt_norm_eps) is not None:
            low = {name: _unit_rms(value, eps) for name, value in low.items()}
        # The bias joins inside the scan, in fp32.
        return _ScanInputs(self.dt_proj.project(low["dt"]), low["B"], low["C"])


def _unit_rms(x: Float[Array, "*bt f"], eps: float) -> Float[Array, "*bt f"]:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype)


def _in_fp32(draw):
    return lambda key, shape, dtype: draw(key, shape, jnp.float32)
