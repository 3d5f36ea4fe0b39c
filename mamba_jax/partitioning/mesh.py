# SPDX-License-Identifier: Apache-2.0
"""The device mesh: four named axes, any number of devices, one host or many."""

import math
import warnings
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

# Outermost first: neighbours along the last axis are neighbours in the machine, so that tensor
# parallelism, which talks most, stays inside a host, and data parallelism crosses hosts.
MESH_AXES = ("data", "fsdp", "sequence", "tensor")


def make_mesh(
    *,
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    sequence: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Arranges devices as a mesh with the axes data, fsdp, sequence, tensor.

    Args:
      data: Replicas that see different rows of the batch. -1, on one of the four, takes whatever
        the others leave.
      fsdp: Like data, with parameters, gradients and optimizer state sharded over it as well.
      tensor: Devices that share each layer's heads, channels and vocabulary.
      sequence: Devices that share the tokens of each row.
      devices: The devices; all of them when None.

    Returns:
      The mesh, for `jax.set_mesh`.

    Raises:
      ValueError: a size is neither positive nor -1, two are -1, or their product is not the number
        of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = {"data": data, "fsdp": fsdp, "sequence": sequence, "tensor": tensor}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise ValueError(f"make_mesh: {name} must be at least 1, or -1; got {size!r}")
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"make_mesh: at most one axis may be -1; got {' and '.join(free)}")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free:
        sizes[free[0]] = len(devices) // fixed
    product = math.prod(sizes.values())
    if product != len(devices):
        wanted = " · ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"make_mesh: the axes must multiply to the number of devices, {len(devices)}; "
            f"got {wanted if product else f'{free[0]}=-1 with {fixed} taken by the others'}"
        )
    grid = np.asarray(devices).reshape([sizes[name] for name in MESH_AXES])
    _warn_across_hosts(grid)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _warn_across_hosts(grid: np.ndarray) -> None:
    hosts = np.vectorize(lambda device: device.process_index)(grid)
    if (hosts != hosts[..., :1]).any():
        warnings.warn(
            f"make_mesh: the tensor axis (size {grid.shape[-1]}) crosses hosts; its collectives "
            "run several times a layer and want the links inside one host",
            stacklevel=3,
        )
