# SPDX-License-Identifier: Apache-2.0
"""Tensor- and sequence-parallel linear maps and embeddings, with their collectives spelled out.

Between layers the tokens of a row are cut over the tensor axis too (sequence parallelism in
Megatron's sense: Korthikanti et al. 2022, arXiv:2205.05198). A column-parallel map gathers them
first, a row-parallel map reduces and scatters them last; each collective is the other's transpose,
so the backward pass is the mirror image. Without a mesh, or where the tokens do not divide evenly
(decoding), the same functions are plain matrix products that the compiler partitions.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mamba_jax.array_types import Array, Float, Int
from mamba_jax.partitioning import rules

_TENSOR, _SEQUENCE = "tensor", "sequence"
_CUT = PartitionSpec(None, (_SEQUENCE, _TENSOR), None)


def column_parallel(
    x: Float[Array, "b t d"],
    kernels: Mapping[str, Float[Array, "d _"]],
    out_axes: Mapping[str, str | None],
) -> dict[str, Float[Array, "b t _"]]:
    """Multiplies x by several kernels whose columns are sharded: one gather for all of them.

    Args:
      x: (b, t, d), float. Input; under a mesh its tokens are cut over sequence and tensor.
      kernels: Name → (d, out), in the dtype of x.
      out_axes: Name → logical name of the output axis.

    Returns:
      Name → x @ kernel, (b, t, out), each device holding its columns of all its row's tokens.
    """
    mesh = tokens_mesh(x)
    if mesh is None:
        return {name: x @ kernel for name, kernel in kernels.items()}
    columns = {
        name: rules.parameter_spec((None, out_axes[name]), kernel.shape, mesh)[1]
        for name, kernel in kernels.items()
    }

    def local(x: Array, kernels: dict[str, Array]) -> dict[str, Array]:
        x = jax.lax.all_gather(x, _TENSOR, axis=1, tiled=True)
        return {name: x @ kernel for name, kernel in kernels.items()}

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(_CUT, {name: PartitionSpec(None, axis) for name, axis in columns.items()}),
        out_specs={name: PartitionSpec(None, _SEQUENCE, axis) for name, axis in columns.items()},
        axis_names={_SEQUENCE, _TENSOR},
        check_vma=False,
    )(x, dict(kernels))


def row_parallel(x: Float[Array, "b t e"], kernel: Float[Array, "e d"]) -> Float[Array, "b t d"]:
    """Multiplies x by a kernel whose rows are sharded, and adds up what the devices have.

    Args:
      x: (b, t, e), float. Input; under a mesh each device holds its channels.
      kernel: (e, d), in the dtype of x.

    Returns:
      x @ kernel, (b, t, d); under a mesh its tokens are cut over sequence and tensor.
    """
    mesh = tokens_mesh(x)
    if mesh is None or x.shape[-1] % mesh.shape[_TENSOR]:
        return x @ kernel

    def local(x: Array, kernel: Array) -> Array:
        return jax.lax.psum_scatter(x @ kernel, _TENSOR, scatter_dimension=1, tiled=True)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(None, _SEQUENCE, _TENSOR), PartitionSpec(_TENSOR, None)),
        out_specs=_CUT,
        axis_names={_SEQUENCE, _TENSOR},
        check_vma=False,
    )(x, kernel)


def vocab_parallel_lookup(
    ids: Int[Array, "b t"], weight: Float[Array, "v d"]
) -> Float[Array, "b t d"]:
    """Looks ids up in a table whose rows are sharded; an id outside the table gives NaN.

    Args:
      ids: (b, t), int.
      weight: (v, d), float.

    Returns:
      (b, t, d), dtype of weight; under a mesh its tokens are cut over sequence and tensor.
    """
    mesh = tokens_mesh(ids)
    if mesh is None or weight.shape[0] % mesh.shape[_TENSOR]:
        return _lookup(ids, weight, jnp.nan)

    def local(ids: Array, weight: Array) -> Array:
        first = jax.lax.axis_index(_TENSOR) * weight.shape[0]
        rows = _lookup(ids - first, weight, 0)
        return jax.lax.psum_scatter(rows, _TENSOR, scatter_dimension=1, tiled=True)

    found = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(None, _SEQUENCE), PartitionSpec(_TENSOR, None)),
        out_specs=_CUT,
        axis_names={_SEQUENCE, _TENSOR},
        check_vma=False,
    )(ids, weight)
    return jnp.where(((ids >= 0) & (ids < weight.shape[0]))[..., None], found, jnp.nan)


def tokens_mesh(x: Array) -> Any:
    """The ambient mesh if the tokens of x, (b, t, ...), can be cut over sequence and tensor."""
    mesh = rules.ambient_mesh()
    if mesh is None or mesh.shape[_TENSOR] == 1 or x.ndim < 2:
        return None
    pieces = mesh.shape[_TENSOR] * mesh.shape[_SEQUENCE]
    return mesh if x.shape[1] % pieces == 0 else None


def _lookup(ids: Array, weight: Array, outside: float) -> Array:
    # A negative index would count from the end; send it beyond the end instead.
    ids = jnp.where(ids < 0, weight.shape[0], ids)
    return weight.at[ids].get(mode="fill", fill_value=outside)
