# SPDX-License-Identifier: Apache-2.0
"""The Mamba-3 mixer: projections and norms around `pallas_kernels.mamba3_scan`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_jax.array_types import Array, Float, Int
from mamba_jax.cache import layer_cache
from mamba_jax.config import Mamba3Config
from mamba_jax.layers.linear import Linear, SplitLinear
from mamba_jax.layers.norms import RMSNorm
from mamba_jax.parameters import dt_bias, parameter
from mamba_jax.partitioning import sharded_ops
from mamba_jax.partitioning.sharded_ops import Mamba3State


class Mamba3(nnx.Module):
    """Mamba-3: exponential-trapezoidal rule, rotating state, optionally MIMO. No convolution.

        z, x, B, C, dt, A, trap, angles = in_proj(u);  B, C = norm(B), norm(C)
        y = mamba3_scan(x, dt, A · dt, B, C, trap, angles, ..., z);  out = out_proj(y)

    Mirrors mamba_ssm `Mamba3`.

    Args:
      d_model: Width d of the input and output.
      rngs: Source of the initial values.
      dtype: Compute dtype; that of the input when None.
      param_dtype: Dtype of the stored weights. D, dt_bias, B_bias, C_bias and mimo_* are always
        fp32.
      implementation: Which implementation of the operations; None for the best.
      **options: The other fields of `Mamba3Config`: d_state=128, expand=2, headdim=64, ngroups=1,
        rope_fraction=0.5, dt_min, dt_max, dt_init_floor, A_floor, is_outproj_norm, is_mimo,
        mimo_rank=4, chunk_size, A_activation.

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
        config = Mamba3Config.from_dict({**options, "d_model": d_model})
        self.config = config
        self.implementation = implementation
        types = {"dtype": dtype, "param_dtype": param_dtype}
        self._create_per_head(config, rngs)
        shared = config.rank * config.ngroups * config.d_state
        pieces = {
            "z": (config.d_inner, "inner"),
            "x": (config.d_inner, "inner"),
            # Ranks come before groups, so a cut by groups is no cut into contiguous pieces.
            "B": (shared, f"groups:{1 if config.rank > 1 else config.ngroups}"),
            "C": (shared, f"groups:{1 if config.rank > 1 else config.ngroups}"),
            "dt": (config.nheads, "heads"),
            "A": (config.nheads, "heads"),
            "trap": (config.nheads, "heads"),
            "angles": (config.num_angles, None),
        }
        self.in_proj = SplitLinear(d_model, pieces, bias=False, rngs=rngs, **types)
        self.B_norm = RMSNorm(config.d_state, "state", param_dtype=param_dtype)
        self.C_norm = RMSNorm(config.d_state, "state", param_dtype=param_dtype)
        self.norm = (
            RMSNorm(config.d_inner, "inner", group_size=config.headdim, param_dtype=param_dtype)
            if config.is_outproj_norm
            else None
        )
        self.out_proj = Linear(
            config.d_inner, d_model, ("inner", "embed"), bias=False, rngs=rngs, **types
        )

    def _create_per_head(self, config: Mamba3Config, rngs: nnx.Rngs) -> None:
        heads, rank = config.nheads, config.rank
        draw_dt = dt_bias(config.dt_min, config.dt_max, config.dt_init_floor)
        bias = jnp.ones((heads, rank, config.d_state), jnp.float32)
        state_axes = ("heads", None, "state")
        self.dt_bias = parameter(
            draw_dt(rngs.params(), (heads,), jnp.float32), ("heads",), weight_decay=False
        )
        self.B_bias = parameter(bias, state_axes, weight_decay=False)
        self.C_bias = parameter(bias, state_axes, weight_decay=False)
        self.D = parameter(jnp.ones((heads,), jnp.float32), ("heads",), weight_decay=False)
        ones = jnp.ones((heads, rank, config.headdim), jnp.float32)
        starts = {"mimo_x": ones / rank, "mimo_z": ones, "mimo_o": ones / rank}
        for name, value in starts.items():
            mimo = parameter(value, ("heads", None, "headdim"), weight_decay=True)
            setattr(self, name, mimo if config.is_mimo else None)

    def init_cache(self, batch: int, dtype: jnp.dtype = jnp.float32) -> Mamba3State:
        """Returns the cache of a mixer that has seen nothing."""
        return layer_cache(self.config, batch, state_dtype=dtype)

    def __call__(
        self,
        u: Float[Array, "b t d"],
        *,
        seq_idx: Int[Array, "b t"] | None = None,
        cache: Mamba3State | None = None,
    ) -> Float[Array, "b t d"] | tuple[Float[Array, "b t d"], Mamba3State]:
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
        arguments = self._scan_arguments(u)
        y, state = sharded_ops.mamba3_scan(
            **arguments,
            seq_idx=seq_idx,
            initial_state=None if cache is None else _cast(cache, arguments["x"].dtype),
            chunk_size=None,
        )
        y = self._output(y)
        return y if cache is None else (y, _like(state, cache))

    def step(
        self, u: Float[Array, "b d"], cache: Mamba3State
    ) -> tuple[Float[Array, "b d"], Mamba3State]:
        """Mixes one token; the same function as `__call__` on a sequence of one."""
        arguments = self._scan_arguments(u)
        y, state = sharded_ops.mamba3_step(_cast(cache, arguments["x"].dtype), **arguments)
        return self._output(y), _like(state, cache)

    def _scan_arguments(self, u: Float[Array, "*bt d"]) -> dict[str, Any]:
        config = self.config
        pieces = self.in_proj(u)
        batch = u.shape[:-1]
        heads = (*batch, config.nheads, config.headdim)
        ranks = (*batch, config.rank, config.ngroups, config.d_state)
        bias = self.dt_bias[...].reshape((1,) * len(batch) + (-1,))
        dt = jax.nn.softplus(pieces["dt"].astype(jnp.float32) + bias)
        angles = pieces["angles"][..., None, :]
        return {
            "x": pieces["x"].reshape(heads),
            "dt": dt,
            "log_decay": self._A(pieces["A"]) * dt,
            "B": self.B_norm(pieces["B"].reshape(ranks)),
            "C": self.C_norm(pieces["C"].reshape(ranks)),
            "trap": pieces["trap"],
            "angles": jnp.broadcast_to(angles, (*batch, config.nheads, config.num_angles)),
            "B_bias": self.B_bias[...],
            "C_bias": self.C_bias[...],
            "D": self.D[...],
            "z": pieces["z"].reshape(heads),
            "mimo_x": None if self.mimo_x is None else self.mimo_x[...],
            "mimo_z": None if self.mimo_z is None else self.mimo_z[...],
            "mimo_o": None if self.mimo_o is None else self.mimo_o[...],
            "norm_weight": None if self.norm is None else self.norm.weight[...].reshape(heads[-2:]),
            "norm_eps": 1e-5 if self.norm is None else self.norm.eps,
            "implementation": self.implementation,
        }

    def _A(self, dd_A: Float[Array, "*bt h"]) -> Float[Array, "*bt h"]:
        """A = min(-f(dd_A), -A_floor) < 0; no gradient where the floor bites."""
        v = dd_A.astype(jnp.float32)
        if self.config.A_activation == "softplus":
            rate = jax.nn.softplus(v)
        else:
            # The inner `where` keeps the unused branch away from its pole at v = 1.
            rate = jnp.where(v >= 0, 1 + v, 1 / (1 - jnp.where(v >= 0, 0, v)))
        return jnp.where(rate > self.config.A_floor, -rate, -self.config.A_floor)

    def _output(self, y: Float[Array, "*bt h p"]) -> Float[Array, "*bt d"]:
        return self.out_proj(y.reshape(*y.shape[:-2], self.config.d_inner))


def _cast(state: Mamba3State, dtype: jnp.dtype) -> Mamba3State:
    return state._replace(
        ssm=state.ssm.astype(jnp.float32), B=state.B.astype(dtype), x=state.x.astype(dtype)
    )


def _like(state: Mamba3State, cache: Mamba3State) -> Mamba3State:
    return jax.tree.map(lambda new, old: new.astype(old.dtype), state, cache)
