# SPDX-License-Identifier: Apache-2.0
"""Tensor- and sequence-parallel linear maps and embeddings, with their collectives spelled out.

Between layers the tokens of a row are cut over the tensor axis too (sequence parallelism in
Megatron's sense: Korthikanti et al. 2022, arXiv:2205.05198). A column-parallel map gathers them
first, a row-parallel map reduces and scatters them last; each collective is the other's transpose,
so the backward pass is the mirror image. Without a mesh, or where the tokens do not divide evenly
(decoding), the same functions are plain matrix products that the compiler partitions.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mamba_jax.array_types import Array, Float, Int
from mamba_jax.partitioning import rules

_TENSOR, _SEQUENCE, _FSDP = "tensor", "sequence", "fsdp"


class _Layout(NamedTuple):
    """How a call's tokens lie on the mesh.

    Attributes:
      mesh: The ambient mesh.
      batch: Mesh axes of the batch; None when they do not divide it.
    """

    mesh: Any
    batch: Any

    @property
    def cut(self) -> PartitionSpec:
        """(b, t, d) with its tokens cut over sequence and tensor."""
        return PartitionSpec(self.batch, (_SEQUENCE, _TENSOR), None)

    def whole(self, axis: str | None) -> PartitionSpec:
        """(b, t, channels) with all tokens of this device's piece, channels over `axis`."""
        return PartitionSpec(self.batch, _SEQUENCE, axis)


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
    layout = _layout(x, 3)
    if layout is None:
        return {name: x @ kernel for name, kernel in kernels.items()}
    specs = {
        name: rules.parameter_spec(("embed", out_axes[name]), kernel.shape, layout.mesh)
        for name, kernel in kernels.items()
    }

    def local(x: Array, kernels: dict[str, Array]) -> dict[str, Array]:
        x = jax.lax.all_gather(x, _TENSOR, axis=1, tiled=True)
        return {name: x @ _gathered(kernel, specs[name]) for name, kernel in kernels.items()}

    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(layout.cut, specs),
        out_specs={name: layout.whole(spec[1]) for name, spec in specs.items()},
        check_vma=False,
    )(x, dict(kernels))


def row_parallel(
    x: Float[Array, "b t e"], kernel: Float[Array, "e d"], in_axis: str | None
) -> Float[Array, "b t d"]:
    """Multiplies x by a kernel whose rows are sharded, and adds up what the devices have.

    Args:
      x: (b, t, e), float. Input; under a mesh each device holds its channels.
      kernel: (e, d), in the dtype of x.
      in_axis: Logical name of the input axis.

    Returns:
      x @ kernel, (b, t, d); under a mesh its tokens are cut over sequence and tensor.
    """
    layout = _layout(x, 3)
    if layout is None:
        return x @ kernel
    spec = rules.parameter_spec((in_axis, "embed"), kernel.shape, layout.mesh)
    if spec[0] is None:
        return x @ kernel

    def local(x: Array, kernel: Array) -> Array:
        y = x @ _gathered(kernel, spec)
        return jax.lax.psum_scatter(y, _TENSOR, scatter_dimension=1, tiled=True)

    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(layout.whole(spec[0]), spec),
        out_specs=layout.cut,
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
    layout = _layout(ids, 2)
    if layout is None:
        return _lookup(ids, weight, jnp.nan)
    spec = rules.parameter_spec(("vocab", "embed"), weight.shape, layout.mesh)
    if spec[0] is None:
        return _lookup(ids, weight, jnp.nan)

    def local(ids: Array, weight: Array) -> Array:
        first = jax.lax.axis_index(_TENSOR) * weight.shape[0]
        rows = _lookup(ids - first, _gathered(weight, spec), 0)
        return jax.lax.psum_scatter(rows, _TENSOR, scatter_dimension=1, tiled=True)

    found = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(PartitionSpec(layout.batch, _SEQUENCE), spec),
        out_specs=layout.cut,
        check_vma=False,
    )(ids, weight)
    return jnp.where(((ids >= 0) & (ids < weight.shape[0]))[..., None], found, jnp.nan)


def _layout(x: Array, ndim: int) -> _Layout | None:
    """How x, (b, t, ...) of `ndim` axes, lies on the ambient mesh.

    None sends the caller to a plain product: no mesh, one that shards no parameter, one token at a
    time, or a number of tokens that the mesh does not divide.
    """
    mesh = rules.ambient_mesh()
    if mesh is None or mesh.shape[_TENSOR] * mesh.shape[_FSDP] == 1 or x.ndim != ndim:
        return None
    if x.shape[1] % (mesh.shape[_TENSOR] * mesh.shape[_SEQUENCE]):
        return None
    batch = rules.ACTIVATIONS["batch"]
    return _Layout(mesh, None if x.shape[0] % rules.axis_size(mesh, batch) else batch)


def _gathered(kernel: Array, spec: PartitionSpec) -> Array:
    """Makes whole the axis that fsdp shards; the transpose scatters the gradient's sum."""
    for axis, name in enumerate(spec):
        if name == _FSDP and jax.lax.axis_size(_FSDP) > 1:
            return jax.lax.all_gather(kernel, _FSDP, axis=axis, tiled=True)
    return kernel


def _lookup(ids: Array, weight: Array, outside: float) -> Array:
    # A negative index would count from the end; send it beyond the end instead.
    ids = jnp.where(ids < 0, weight.shape[0], ids)
    return weight.at[ids].get(mode="fill", fill_value=outside)
