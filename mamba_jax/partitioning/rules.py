# SPDX-License-Identifier: Apache-2.0
"""Which mesh axis shards which array axis: one table for parameters, one for activations.

Modules name their array axes by meaning (`parameters.py`); this file alone turns names into mesh
axes. Without a mesh nothing here does anything.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mamba_jax.array_types import Array
from mamba_jax.config import MambaConfig

# Logical name → mesh axes. Names that are not listed are replicated.
PARAMETERS: dict[str, str | tuple[str, ...]] = {
    "vocab": "tensor",
    "embed": "fsdp",
    "inner": "tensor",
    "heads": "tensor",
    "groups": "tensor",
    "mlp": "tensor",
}
ACTIVATIONS: dict[str, str | tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "time": "sequence",
    "inner": "tensor",
    "heads": "tensor",
    "groups": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}


def ambient_mesh() -> jax.sharding.AbstractMesh | None:
    """The mesh set by `jax.set_mesh`, or None without one or inside a `shard_map` over it."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes or "tensor" not in mesh.axis_names:
        return None
    return mesh


def axis_size(mesh: Any, axes: str | tuple[str, ...] | None) -> int:
    """Number of devices along a mesh axis, or along several together; 1 for None."""
    if axes is None:
        return 1
    size = 1
    for name in (axes,) if isinstance(axes, str) else axes:
        size *= mesh.shape[name]
    return size


def constrain(x: Array, *names: str | None) -> Array:
    """Asks for `x` to be laid out as its axes' logical names say; the identity without a mesh."""
    mesh = ambient_mesh()
    if mesh is None:
        return x
    spec = PartitionSpec(*(ACTIVATIONS.get(name) if name else None for name in names))
    return jax.lax.with_sharding_constraint(x, spec)


def check_divisible(config: MambaConfig, mesh: Any) -> None:
    """Raises ValueError, with the numbers, where the mesh does not divide the model evenly."""
    tensor, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
    mixer, attention = config.mixer, config.attention
    sizes = {"padded vocabulary": config.padded_vocab_size}
    if config.mixer_kind == "Mamba1":
        sizes["d_inner"] = mixer.d_inner
    elif config.mixer_kind in {kind for kind, _, _ in config.runs}:
        sizes["number of heads"] = mixer.nheads
    if attention is not None:
        sizes["num_heads of attention"] = attention.num_heads
    for name, size in sizes.items():
        if size % tensor:
            raise ValueError(f"the tensor axis must divide the {name} {size}; got tensor={tensor}")
    if config.d_model % fsdp:
        raise ValueError(f"the fsdp axis must divide d_model={config.d_model}; got fsdp={fsdp}")
    groups = getattr(mixer, "ngroups", 1)
    if groups % tensor and tensor % groups:
        raise ValueError(
            f"ngroups and the tensor axis must divide one another; got ngroups={groups}, "
            f"tensor={tensor}"
        )


def parameter_shardings(model: nnx.Module, mesh: Mesh, config: MambaConfig | None) -> nnx.State:
    """Returns the `NamedSharding` of every parameter, as a state with the model's structure.

    Args:
      model: The model, or its shapes.
      mesh: From `make_mesh`.
      config: A language model's config, whose sizes are checked against the mesh; None for any
        other module, whose parameters are checked one by one.

    Raises:
      ValueError: the mesh does not divide the model evenly.
    """
    state = nnx.state(model, nnx.Param)
    if config is None:
        _check_parameters(state, mesh)
    else:
        check_divisible(config, mesh)

    def sharding(param: nnx.Param) -> NamedSharding:
        names: Sequence[str | None] = param.get_metadata("logical_axes")
        return NamedSharding(mesh, parameter_spec(names, param.shape, mesh))

    return jax.tree.map(sharding, state, is_leaf=_is_variable)


def shard_model(model: nnx.Module, mesh: Mesh) -> nnx.Module:
    """Places the parameters of a model, or of one mixer or layer, on a mesh.

    Args:
      model: A `MambaLMHeadModel`, a mixer (`Mamba`, `Mamba2`, `Mamba3`), or a layer such as
        `ColumnParallelLinear`.
      mesh: From `make_mesh`.

    Returns:
      The model with the same values, each parameter laid out by the table in this file. Call it
      under `jax.set_mesh(mesh)`.

    Raises:
      ValueError: the mesh does not divide the heads, channels, vocabulary or width evenly.
    """
    graph, state, rest = nnx.split(model, nnx.Param, ...)
    shardings = parameter_shardings(model, mesh, _language_model(model))
    values = jax.device_put(nnx.to_pure_dict(state), nnx.to_pure_dict(shardings))
    nnx.replace_by_pure_dict(state, values)
    return nnx.merge(graph, state, rest)


def sharded_init(make_model: Callable[[], nnx.Module], mesh: Mesh) -> nnx.Module:
    """Builds a model directly on the mesh: no device, and not the host, ever holds it whole.

    Args:
      make_model: Builds the model, e.g. `lambda: MambaLMHeadModel(config, rngs=nnx.Rngs(0))`; as
        for `shard_model`, a mixer or a layer will do.
      mesh: From `make_mesh`.

    Returns:
      The model; the same values as built on one device.

    Raises:
      ValueError: as for `shard_model`.
    """
    abstract = jax.eval_shape(make_model)
    shardings = parameter_shardings(abstract, mesh, _language_model(abstract))
    graph, _, rest = nnx.split(abstract, nnx.Param, ...)

    def create() -> dict:
        return nnx.to_pure_dict(nnx.state(make_model(), nnx.Param))

    values = jax.jit(create, out_shardings=nnx.to_pure_dict(shardings))()
    state = nnx.state(abstract, nnx.Param)
    nnx.replace_by_pure_dict(state, values)
    return nnx.merge(graph, state, rest)


def _language_model(model: nnx.Module) -> MambaConfig | None:
    config = getattr(model, "config", None)
    return config if isinstance(config, MambaConfig) else None


def _check_parameters(state: nnx.State, mesh: Any) -> None:
    for path, param in jax.tree.leaves_with_path(state, is_leaf=_is_variable):
        names = param.get_metadata("logical_axes")
        for name, size in zip(names, param.shape[-len(names) :], strict=True):
            # Axes of indivisible units, "groups:2", may stay whole.
            axis = PARAMETERS.get(name or "")
            if axis is not None and size % axis_size(mesh, axis):
                raise ValueError(
                    f"the {axis} axis must divide axis {name!r} of {jax.tree_util.keystr(path)}, "
                    f"{size}; got {axis}={axis_size(mesh, axis)}"
                )


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def parameter_spec(names: Sequence[str | None], shape: Sequence[int], mesh: Any) -> PartitionSpec:
    """Translates a parameter's logical axis names.

    A name may carry the number of units that must not be cut, "groups:2" say: with more devices
    than that, or a number that does not divide it, the axis stays whole on every device. Stacked
    layers add an axis in front, which is never cut.
    """
    names = (None,) * (len(shape) - len(names)) + tuple(names)
    axes = []
    for name, size in zip(names, shape, strict=True):
        logical, _, units = (name or "").partition(":")
        axis = PARAMETERS.get(logical)
        whole = axis is None or int(units or size) % axis_size(mesh, axis)
        axes.append(None if whole else axis)
    return PartitionSpec(*axes)


def addressable_bytes(tree: Any) -> int:
    """Bytes that one device holds of a tree of arrays (the fullest device's share)."""
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            size = int(jnp.size(shard.data)) * leaf.dtype.itemsize
            held[shard.device] = held.get(shard.device, 0) + size
    return max(held.values(), default=0)
