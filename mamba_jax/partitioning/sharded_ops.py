# SPDX-License-Identifier: Apache-2.0
"""The operations as the modules call them; the only door to `pallas_kernels`.

Without a mesh (`jax.set_mesh`) these are the operations themselves. With one, each runs inside
`shard_map` on its own rows (mesh axes data, fsdp) and its own heads or channels (tensor), where a
kernel sees plain local arrays; tokens cut over the sequence axis go through `sequence.py`.
Convolutions and norms need no kernel-side knowledge of the mesh: the compiler partitions them, and
only the convolution's look back across a cut is spelled out.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

import pallas_kernels
from mamba_jax.array_types import Array
from mamba_jax.partitioning import rules, sequence
from pallas_kernels import (
    Mamba3State,
    add_layer_norm,
    add_rms_norm,
    causal_conv1d_update,
    explain,
    rms_norm,
)
from pallas_kernels.packing import resolve

__all__ = [
    "Mamba3State",
    "add_layer_norm",
    "add_rms_norm",
    "causal_conv1d",
    "causal_conv1d_update",
    "explain",
    "mamba3_scan",
    "mamba3_step",
    "resolve",
    "rms_norm",
    "selective_scan",
    "selective_state_update",
    "ssd",
]

# Axes of every argument, by logical name; "_" is never sharded. "|" separates alternatives, told
# apart by rank.
_STATE = {
    "selective_scan": "batch inner _",
    "ssd": "batch heads _ _",
    "mamba3_scan": Mamba3State(
        "batch heads _", "batch heads _ _", "batch _ heads _", "batch heads _"
    ),
}
_SSD = {
    "x": "batch time heads _",
    "dt": "batch time heads",
    "A": "heads",
    "B": "batch time groups _",
    "C": "batch time groups _",
    "D": "heads|heads _",
    "z": "batch time heads _",
    "dt_bias": "heads",
    "seq_idx": "batch time",
    "initial_state": _STATE["ssd"],
}
_SELECTIVE_SCAN = {
    "x": "batch time inner",
    "dt": "batch time inner",
    "A": "inner _",
    "B": "inner _|batch time _|batch time groups _",
    "C": "inner _|batch time _|batch time groups _",
    "D": "inner",
    "z": "batch time inner",
    "dt_bias": "inner",
    "seq_idx": "batch time",
    "initial_state": _STATE["selective_scan"],
}
_MAMBA3 = {
    "x": "batch time heads _",
    "dt": "batch time heads",
    "log_decay": "batch time heads",
    "B": "batch time _ groups _",
    "C": "batch time _ groups _",
    "trap": "batch time heads",
    "angles": "batch time heads _",
    "B_bias": "heads _ _",
    "C_bias": "heads _ _",
    "D": "heads",
    "z": "batch time heads _",
    "mimo_x": "heads _ _",
    "mimo_z": "heads _ _",
    "mimo_o": "heads _ _",
    "norm_weight": "heads _",
    "seq_idx": "batch time",
    "initial_state": _STATE["mamba3_scan"],
}
_STEP_PER_HEAD = {
    "state": _STATE["ssd"],
    "x": "batch heads _",
    "dt": "batch heads",
    "A": "heads",
    "B": "batch groups _",
    "C": "batch groups _",
    "D": "heads|heads _",
    "z": "batch heads _",
    "dt_bias": "heads",
}
_STEP_PER_CHANNEL = {
    "state": _STATE["selective_scan"],
    "x": "batch inner",
    "dt": "batch inner",
    "A": "inner _",
    "B": "batch _",
    "C": "batch _",
    "D": "inner",
    "z": "batch inner",
    "dt_bias": "inner",
}


def ssd(*args: Any, **kwargs: Any) -> tuple[Array, Array]:
    """`pallas_kernels.ssd` under the ambient mesh."""
    names = ("x", "dt", "A", "B", "C", "D")
    return _scan("ssd", _SSD, dict(zip(names, args, strict=False)) | kwargs)


def selective_scan(*args: Any, **kwargs: Any) -> tuple[Array, Array]:
    """`pallas_kernels.selective_scan` under the ambient mesh."""
    names = ("x", "dt", "A", "B", "C", "D")
    call = dict(zip(names, args, strict=False)) | kwargs
    return _scan("selective_scan", _SELECTIVE_SCAN, call)


def mamba3_scan(**kwargs: Any) -> tuple[Array, Mamba3State]:
    """`pallas_kernels.mamba3_scan` under the ambient mesh."""
    return _scan("mamba3_scan", _MAMBA3, kwargs)


def selective_state_update(state: Array, *args: Any, **kwargs: Any) -> tuple[Array, Array]:
    """`pallas_kernels.selective_state_update` under the ambient mesh."""
    names = ("x", "dt", "A", "B", "C", "D")
    call = {"state": state} | dict(zip(names, args, strict=False)) | kwargs
    layout = _STEP_PER_HEAD if state.ndim == 4 else _STEP_PER_CHANNEL
    return _local(pallas_kernels.selective_state_update, layout, call, layout["state"])


def mamba3_step(state: Mamba3State, **kwargs: Any) -> tuple[Array, Mamba3State]:
    """`pallas_kernels.mamba3_step` under the ambient mesh."""
    state_axes = _STATE["mamba3_scan"]
    layout = {name: _without_time(axes) for name, axes in _MAMBA3.items() if isinstance(axes, str)}
    call = {"state": state} | kwargs
    return _local(pallas_kernels.mamba3_step, layout | {"state": state_axes}, call, state_axes)


def causal_conv1d(
    x: Array, weight: Array, bias: Array | None = None, **kwargs: Any
) -> tuple[Array, Array]:
    """`pallas_kernels.causal_conv1d` under the ambient mesh."""
    mesh = rules.ambient_mesh()
    if mesh is None or not _cuts_time(mesh, x.shape[1]):
        return pallas_kernels.causal_conv1d(x, weight, bias, **kwargs)
    arrays = {"x": x, "weight": weight, "bias": bias}
    arrays |= {name: kwargs.pop(name, None) for name in ("seq_idx", "initial_state")}
    arrays = {name: value for name, value in arrays.items() if value is not None}
    time = PartitionSpec(None, sequence.AXIS)
    specs = {name: time if name in ("x", "seq_idx") else PartitionSpec() for name in arrays}
    local = partial(sequence.causal_conv1d, pallas_kernels.causal_conv1d, **kwargs)
    # Manual over the sequence axis alone: channels and rows stay with the compiler.
    return jax.shard_map(
        lambda arrays: local(**arrays),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(time, PartitionSpec()),
        axis_names={sequence.AXIS},
        check_vma=False,
    )(arrays)


def _scan(name: str, layout: dict[str, Any], call: dict[str, Any]) -> tuple[Array, Any]:
    op = getattr(pallas_kernels, name)
    mesh = rules.ambient_mesh()
    if mesh is not None and _cuts_time(mesh, call["x"].shape[1]):
        op = partial(sequence.scan, name, op)
    return _local(op, layout, call, _STATE[name])


def _local(
    op: Callable[..., Any], layout: dict[str, Any], call: dict[str, Any], state_axes: Any
) -> tuple[Array, Any]:
    """Calls `op(**call)`, on each device's own part under a mesh."""
    mesh = rules.ambient_mesh()
    if mesh is None:
        return op(**call)
    arrays = {name: call[name] for name in layout if call.get(name) is not None}
    options = {name: value for name, value in call.items() if name not in layout}
    axes = _mesh_axes(mesh, arrays, layout)
    specs = {
        name: jax.tree.map(lambda a, s: _spec(s, a.ndim, axes), value, layout[name])
        for name, value in arrays.items()
    }
    y_spec = _spec(layout["x"], arrays["x"].ndim, axes)
    if call.get("mimo_x") is not None and call.get("mimo_o") is None:
        y_spec = PartitionSpec(*y_spec[:-2], None, *y_spec[-2:])
    state_spec = jax.tree.map(lambda s: _spec(s, len(s.split()), axes), state_axes)

    def run(arrays: dict[str, Any]) -> tuple[Array, Any]:
        return op(**_own_group(arrays, layout, axes, mesh), **options)

    return jax.shard_map(
        run, mesh=mesh, in_specs=(specs,), out_specs=(y_spec, state_spec), check_vma=False
    )(arrays)


def _mesh_axes(mesh: Any, arrays: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    """Logical name → mesh axes for this call; checks what must divide."""
    sizes: dict[str, int] = {}
    for name, value in arrays.items():
        if isinstance(layout[name], str):
            for axis, size in zip(_axes(layout[name], value.ndim), value.shape, strict=True):
                sizes.setdefault(axis, size)
    axes = dict(rules.ACTIVATIONS)
    for axis in ("heads", "inner"):
        tensor = rules.axis_size(mesh, axes[axis])
        if sizes.get(axis, 0) % tensor:
            raise ValueError(f"the tensor axis, {tensor}, must divide the {sizes[axis]} {axis}")
    if sizes["batch"] % rules.axis_size(mesh, axes["batch"]):
        axes["batch"] = None  # few rows (decoding, say): every replica computes all of them
    if not _cuts_time(mesh, sizes.get("time", 1)):
        axes["time"] = None
    if sizes.get("groups", 1) % rules.axis_size(mesh, axes["groups"]):
        axes["groups"] = None  # each device takes the group of its heads, in _own_group
    return axes


def _own_group(
    arrays: dict[str, Any], layout: dict[str, Any], axes: dict[str, Any], mesh: Any
) -> dict[str, Any]:
    """Where groups are whole on each device, keeps the one that this device's heads read."""
    devices = mesh.shape["tensor"]
    if axes["groups"] is not None or devices == 1:
        return arrays
    kept = dict(arrays)
    for name in ("B", "C"):
        names = _axes(layout[name], arrays[name].ndim)
        if "groups" not in names:
            continue
        axis = names.index("groups")
        groups = arrays[name].shape[axis]
        if devices % groups:
            raise ValueError(
                f"groups and the tensor axis must divide one another; got {groups} groups, "
                f"tensor={devices}"
            )
        mine = jax.lax.axis_index("tensor") * groups // devices
        kept[name] = jax.lax.dynamic_slice_in_dim(arrays[name], mine, 1, axis)
    return kept


def _cuts_time(mesh: Any, time: int) -> bool:
    pieces = rules.axis_size(mesh, rules.ACTIVATIONS["time"])
    return pieces > 1 and time % pieces == 0


def _axes(layout: str, ndim: int) -> list[str]:
    return next(a for a in (one.split() for one in layout.split("|")) if len(a) == ndim)


def _spec(layout: str, ndim: int, axes: dict[str, Any]) -> PartitionSpec:
    return PartitionSpec(*(axes.get(name) for name in _axes(layout, ndim)))


def _without_time(layout: str) -> str:
    return " ".join(name for name in layout.split() if name != "time")
