# SPDX-License-Identifier: Apache-2.0
"""The Mamba-2 mixer: projections, convolution and gated norm around `pallas_kernels.ssd`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_jax.array_types import Array, Float, Int
from mamba_jax.cache import Mamba2Cache, layer_cache
from mamba_jax.config import Mamba2Config
from mamba_jax.layers.conv import SplitCausalConv1d
from mamba_jax.layers.linear import Linear, SplitLinear
from mamba_jax.layers.norms import RMSNorm
from mamba_jax.parameters import dt_bias, fan_in_uniform, log_uniform, parameter, uniform
from mamba_jax.partitioning import sharded_ops


class Mamba2(nnx.Module):
    """Mamba-2: state-space duality, one decay per head.

        z, x, B, C, dt = in_proj(u);  x, B, C = silu(conv(x, B, C))
        y = ssd(x, dt, A, B, C, D);  out = out_proj(norm(y, gate z))

    Source: Dao & Gu 2024, arXiv:2405.21060, section 7. Mirrors mamba_ssm `Mamba2`.

    Args:
      d_model: Width d of the input and output.
      rngs: Source of the initial values.
      dtype: Compute dtype; that of the input when None.
      param_dtype: Dtype of the stored weights. A_log, D and dt_bias are always fp32.
      implementation: Which implementation of the operations; None for the best.
      **options: The other fields of `Mamba2Config`: d_state=128, d_conv=4, expand=2, headdim=64,
        d_ssm, ngroups=1, A_init_range, D_has_hdim, rmsnorm, norm_before_gate, dt_min, dt_max,
        dt_init_floor, dt_limit, bias, conv_bias, conv_init, chunk_size.

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
        config = Mamba2Config.from_dict({**options, "d_model": d_model})
        self.config = config
        self.implementation = implementation
        types = {"dtype": dtype, "param_dtype": param_dtype}
        self._create_per_head(config, rngs)
        shared = config.ngroups * config.d_state
        conv_pieces = {
            "x": (config.d_ssm_inner, "inner"),
            "B": (shared, f"groups:{config.ngroups}"),
            "C": (shared, f"groups:{config.ngroups}"),
        }
        mlp = {"z0": (config.d_mlp, "inner"), "x0": (config.d_mlp, "inner")} if config.d_mlp else {}
        pieces = {
            **mlp,
            "z": (config.d_ssm_inner, "inner"),
            **conv_pieces,
            "dt": (config.nheads, "heads"),
        }
        self.in_proj = SplitLinear(d_model, pieces, bias=config.bias, rngs=rngs, **types)
        self.conv1d = SplitCausalConv1d(
            conv_pieces,
            config.d_conv,
            bias=config.conv_bias,
            activation="silu",
            rngs=rngs,
            param_dtype=param_dtype,
            weight_init=None if config.conv_init is None else uniform(config.conv_init),
            implementation=implementation,
        )
        self.norm = (
            RMSNorm(
                config.d_ssm_inner,
                "inner",
                group_size=config.d_ssm_inner // config.ngroups,
                norm_before_gate=config.norm_before_gate,
                param_dtype=param_dtype,
            )
            if config.rmsnorm
            else None
        )
        # Both parts of the original's out_proj start from the width of the whole.
        out = {"kernel_init": fan_in_uniform(config.d_inner), "rngs": rngs, **types}
        self.out_proj = Linear(
            config.d_ssm_inner, d_model, ("inner", "embed"), bias=config.bias, **out
        )
        self.out_proj_mlp = (
            Linear(config.d_mlp, d_model, ("inner", "embed"), bias=False, **out)
            if config.d_mlp
            else None
        )

    def _create_per_head(self, config: Mamba2Config, rngs: nnx.Rngs) -> None:
        """Creates A_log, D and dt_bias: fp32 whatever the dtype of the weights, no decay."""
        per_head = (config.nheads,)
        draw_dt = dt_bias(config.dt_min, config.dt_max, config.dt_init_floor)
        draw_A = log_uniform(*config.A_init_range)
        D_shape = (config.nheads, config.headdim) if config.D_has_hdim else per_head
        values = {
            "dt_bias": draw_dt(rngs.params(), per_head, jnp.float32),
            "A_log": draw_A(rngs.params(), per_head, jnp.float32),
            "D": jnp.ones(D_shape, jnp.float32),
        }
        for name, value in values.items():
            axes = ("heads", "headdim")[: value.ndim]
            setattr(self, name, parameter(value, axes, weight_decay=False))

    def init_cache(self, batch: int, dtype: jnp.dtype = jnp.float32) -> Mamba2Cache:
        """Returns the cache of a mixer that has seen nothing."""
        return layer_cache(self.config, batch, state_dtype=dtype)

    def __call__(
        self,
        u: Float[Array, "b t d"],
        *,
        seq_idx: Int[Array, "b t"] | None = None,
        cache: Mamba2Cache | None = None,
    ) -> Float[Array, "b t d"] | tuple[Float[Array, "b t d"], Mamba2Cache]:
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
        config = self.config
        pieces = self.in_proj(u)
        conv_states = None if cache is None else _cast(cache.conv, pieces["x"].dtype)
        convolved, conv_states = self.conv1d(pieces, seq_idx=seq_idx, states=conv_states)
        pieces |= convolved
        y, ssm_state = sharded_ops.ssd(
            self._heads(pieces["x"]),
            pieces["dt"],
            self._A(),
            self._groups(pieces["B"]),
            self._groups(pieces["C"]),
            self.D[...],
            z=None if config.rmsnorm else self._heads(pieces["z"]),
            dt_bias=self.dt_bias[...],
            dt_softplus=True,
            dt_limit=config.dt_limit,
            seq_idx=seq_idx,
            initial_state=None if cache is None else cache.ssm.astype(jnp.float32),
            chunk_size=None,
            implementation=self.implementation,
        )
        y = self._output(y, pieces)
        if cache is None:
            return y
        conv = {name: s.astype(cache.conv[name].dtype) for name, s in conv_states.items()}
        return y, Mamba2Cache(conv, ssm_state.astype(cache.ssm.dtype))

    def step(
        self, u: Float[Array, "b d"], cache: Mamba2Cache
    ) -> tuple[Float[Array, "b d"], Mamba2Cache]:
        """Mixes one token; the same function as `__call__` on a sequence of one."""
        config = self.config
        pieces = self.in_proj(u)
        convolved, conv_states = self.conv1d.step(pieces, _cast(cache.conv, pieces["x"].dtype))
        pieces |= convolved
        y, ssm_state = sharded_ops.selective_state_update(
            cache.ssm,
            self._heads(pieces["x"]),
            pieces["dt"],
            self._A(),
            self._groups(pieces["B"]),
            self._groups(pieces["C"]),
            self.D[...],
            z=None if config.rmsnorm else self._heads(pieces["z"]),
            dt_bias=self.dt_bias[...],
            dt_softplus=True,
            dt_limit=config.dt_limit,
            implementation=self.implementation,
        )
        conv = {name: s.astype(cache.conv[name].dtype) for name, s in conv_states.items()}
        return self._output(y, pieces), Mamba2Cache(conv, ssm_state)

    def _A(self) -> Float[Array, " h"]:
        return -jnp.exp(self.A_log[...].astype(jnp.float32))

    def _heads(self, x: Float[Array, "*bt e"]) -> Float[Array, "*bt h p"]:
        return x.reshape(*x.shape[:-1], self.config.nheads, self.config.headdim)

    def _groups(self, x: Float[Array, "*bt gn"]) -> Float[Array, "*bt g n"]:
        return x.reshape(*x.shape[:-1], self.config.ngroups, self.config.d_state)

    def _output(self, y: Float[Array, "*bt h p"], pieces: dict[str, Array]) -> Array:
        y = y.reshape(*y.shape[:-2], self.config.d_ssm_inner)
        if self.norm is not None:
            y = self.norm(y, pieces["z"])
        out = self.out_proj(y)
        if self.out_proj_mlp is not None:
            out = out + self.out_proj_mlp(jax.nn.silu(pieces["z0"]) * pieces["x0"])
        return out


def _cast(states: dict[str, Array], dtype: jnp.dtype) -> dict[str, Array]:
    return {name: state.astype(dtype) for name, state in states.items()}
