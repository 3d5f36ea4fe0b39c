# SPDX-License-Identifier: Apache-2.0
"""Where a run's arrays live: its mesh, and the shardings of batches and of the state.

Parameters follow the table in `mamba_jax/partitioning/rules.py`; the optimizer's moments lie where
their parameters do. With one device there is no mesh, and everything here is None.
"""

import contextlib
import math
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mamba_jax.partitioning import mesh as meshes
from mamba_jax.partitioning import rules
from train.config import MeshConfig, TrainConfig, UserError


def make_mesh(config: MeshConfig) -> Mesh | None:
    """Builds the mesh; None when it has a single device.

    With every axis given, one process may use only the first of its devices.

    Raises:
      UserError: the axes' sizes do not fit the number of devices.
    """
    sizes = {"fsdp": config.fsdp, "tensor": config.tensor, "sequence": config.sequence}
    devices = jax.devices()
    wanted = config.data * math.prod(sizes.values())
    if 0 < wanted < len(devices) and jax.process_count() == 1:
        devices = devices[:wanted]
    if len(devices) == 1 and wanted <= 1:
        return None
    try:
        return meshes.make_mesh(data=config.data or -1, devices=devices, **sizes)
    except ValueError as error:
        raise UserError(str(error).replace("make_mesh", "mesh")) from None


def on(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """The context in which a run's functions are traced and called."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def batch_sharding(mesh: Mesh | None, config: TrainConfig) -> NamedSharding | None:
    """Rows over data and fsdp, tokens over sequence.

    Raises:
      UserError: rows or tokens do not divide evenly.
    """
    if mesh is None:
        return None
    rows, time = (rules.ACTIVATIONS[name] for name in ("batch", "time"))
    for field, size, axes in (
        ("data.batch_size", config.data.batch_size // config.optimizer.accumulate, rows),
        ("data.seq_len", config.data.seq_len, time),
    ):
        devices = rules.axis_size(mesh, axes)
        if size % devices:
            raise UserError(
                f"{field}: wanted a multiple of {devices} (mesh axes {axes}) in each of the "
                f"accumulated parts, got {size}"
            )
    return NamedSharding(mesh, PartitionSpec(rows, time))


def state_shardings(mesh: Mesh | None, config: TrainConfig, model: nnx.Module, like: Any) -> Any:
    """The sharding of every leaf of a train state.

    Args:
      mesh: From `make_mesh`.
      config: The run.
      model: The model, or its shapes.
      like: The state, or its shapes.

    Raises:
      UserError: the mesh does not divide the model evenly.
    """
    if mesh is None:
        return None
    try:
        params = nnx.to_pure_dict(rules.parameter_shardings(model, mesh, config.model))
    except ValueError as error:
        raise UserError(f"mesh: {error}") from None
    params = {_name(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}
    whole = NamedSharding(mesh, PartitionSpec())

    def sharding(path: tuple, leaf: Any) -> NamedSharding:
        # Moments are trees like the parameters', below a field of the optimizer's state.
        name = _name(path)
        return next((s for param, s in params.items() if name.endswith(f"/{param}")), whole)

    return jax.tree.map_with_path(sharding, like)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
