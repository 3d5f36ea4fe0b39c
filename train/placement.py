# SPDX-License-Identifier: Apache-2.0
"""Where a run's arrays live: the mesh, the sharding of batches and that of the state."""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from train.config import MeshConfig, UserError


def make_mesh(config: MeshConfig) -> Mesh | None:
    """Builds the mesh over all devices; None for one device, where nothing is sharded.

    Raises:
      UserError: the axes' sizes do not multiply to the number of devices.
    """
    devices = jax.device_count()
    others = config.fsdp * config.tensor * config.sequence
    data = config.data or devices // others
    if data * others != devices:
        raise UserError(
            f"mesh: data · fsdp · tensor · sequence wanted {devices} (the devices here), "
            f"got {data} · {config.fsdp} · {config.tensor} · {config.sequence}"
        )
    if others > 1:
        raise UserError("mesh: wanted fsdp, tensor and sequence 1 (training shards data only)")
    if devices == 1:
        return None
    return jax.make_mesh((data,), ("data",), axis_types=(AxisType.Auto,))


def batch_sharding(mesh: Mesh | None) -> NamedSharding | None:
    """Rows over the data axis."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec("data"))


def state_sharding(mesh: Mesh | None) -> NamedSharding | None:
    """Every device holds the whole state."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())
