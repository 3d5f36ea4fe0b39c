# SPDX-License-Identifier: Apache-2.0
"""Reads compiled programs: the collectives of a layer, the memory of a train step, the overlap.

Nothing is run and no parameter allocated; shapes with shardings go in, the compiler's program and
its plan of memory come out.
"""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.kernels_check import TARGET
from mamba_jax import MambaLMHeadModel, make_mesh, shard_model
from mamba_jax.presets import PRESETS
from train.config import DataConfig, TrainConfig
from train.placement import batch_sharding
from train.step import abstract_state, make_train_step

KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
LAYER_MESHES = (
    {"tensor": 4, "data": 1},
    {"fsdp": 4, "data": 1},
    {"sequence": 4, "data": 1},
    {"data": 4},
    {"fsdp": 2, "tensor": 2, "sequence": 2, "data": 1},
)
OVERLAP_MESHES = ({"fsdp": 4, "tensor": 2, "data": 1},)
WORK = {"model": "mamba2-2.7b", "rows": 8, "tokens_per_row": 2048, "target": "8 x NVIDIA H200"}
# Choosing among kernels for a matrix product would need the GPU: no autotuning, cuBLAS throughout.
_OFFLINE = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def memory_meshes() -> list[dict[str, int]]:
    """One device; tensor and fsdp alone on 2, 4, 8; both on 8."""
    alone = [{axis: size, "data": 1} for axis in ("tensor", "fsdp") for size in (2, 4, 8)]
    both = [{"fsdp": 4, "tensor": 2, "data": 1}, {"fsdp": 2, "tensor": 4, "data": 1}]
    return [{"data": 1}, *alone, *both]


def layer_collectives(model: MambaLMHeadModel, mesh: Mesh, *, gradient: bool) -> dict[str, int]:
    """Counts the collectives in the compiled program of one layer, on the devices of `mesh`."""
    graph, state = nnx.split(shard_model(model, mesh).runs[0])
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    cut = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), ("sequence", "tensor"), None))
    hidden = jax.ShapeDtypeStruct((8, 16, model.config.d_model), jnp.float32, sharding=cut)

    def layer(state, hidden, residual):
        first = jax.tree.map(lambda leaf: leaf[0], nnx.merge(graph, state))
        return first(hidden, residual)[:2]

    def loss(*arguments):
        return sum(jnp.sum(jnp.square(out)) for out in layer(*arguments))

    call, out = (layer, (cut, cut))
    if gradient:
        call, out = jax.grad(loss, argnums=(0, 1, 2)), (shardings, cut, cut)
    with jax.set_mesh(mesh):
        compiled = jax.jit(call, out_shardings=out).lower(state, hidden, hidden).compile()
    return dict(collections.Counter(re.findall(rf" ({KINDS})(?:-start)?\(", compiled.as_text())))


def memory(sizes: dict[str, int]) -> dict[str, int]:
    """Bytes per GPU of a train step of mamba2-2.7b: bf16 activations, fp32 AdamW, remat."""
    state, compiled = _train_step(sizes)
    plan = compiled.memory_analysis()
    return {
        "parameters": _bytes_per_device(state["params"]),
        "optimizer": _bytes_per_device(state["optimizer"]),
        "temporary": plan.temp_size_in_bytes,
        "arguments": plan.argument_size_in_bytes,
    }


def overlap(sizes: dict[str, int]) -> dict[str, dict[str, int]]:
    """What runs beside each collective of the train step; see `company`.

    With XLA's latency-hiding scheduler, as one would train.
    """
    options = {"xla_gpu_enable_latency_hiding_scheduler": True}
    _, compiled = _train_step(sizes, options)
    return company(compiled.as_text())


def company(text: str) -> dict[str, dict[str, int]]:
    """Counts the collectives of a scheduled program by kind and mesh axes.

    Each with how many are asynchronous, how many have a matrix product between their start and
    their end, and how many any other fusion.
    """
    found: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    running: dict[str, tuple[str, set]] = {}
    for line in text.splitlines():
        match = re.match(r"\s+(?:ROOT )?%(\S+) = .*? ([a-z][\w-]+)\(%?([\w.-]*)", line)
        if match is None:
            continue
        name, operation, operand = match.groups()
        kind, _, end = operation.rpartition("-")
        if re.fullmatch(KINDS, kind) and end == "start":
            running[name] = (f"{kind} over {_axes(line)}", set())
        elif re.fullmatch(KINDS, kind) and end == "done":
            key, beside = running.pop(operand)
            found[key] += collections.Counter(total=1, asynchronous=1, **dict.fromkeys(beside, 1))
        elif re.fullmatch(KINDS, operation):
            found[f"{operation} over {_axes(line)}"]["total"] += 1
        elif operation in ("fusion", "custom-call"):
            company = "beside_products" if "gemm" in line else "beside_other_work"
            for _, beside in running.values():
                beside.add(company)
    return {key: dict(found[key]) for key in sorted(found)}


def _axes(line: str) -> str:
    """Mesh axes of a collective, where the compiler kept their names."""
    names = re.search(r"replica_groups=mesh\[[^\]]*\] \{([^}]*)\}", line)
    known = names and re.findall("data|fsdp|sequence|tensor", names.group(1))
    return " and ".join(known) if known else "unnamed axes"


def _train_step(sizes: dict[str, int], options: dict | None = None):
    """Compiles the train step for the H200 mesh of these sizes."""
    devices = _h200s()[: math.prod(sizes.values())]
    mesh = make_mesh(**sizes, devices=devices)
    config = TrainConfig(
        model=PRESETS[WORK["model"]],
        data=DataConfig(seq_len=WORK["tokens_per_row"], batch_size=WORK["rows"]),
        compute_dtype="bfloat16",
        remat=True,
        implementation="xla",
    )
    state = abstract_state(config, mesh)
    rows = batch_sharding(mesh, config)
    shape = (config.data.batch_size, config.data.seq_len)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)
    mask = jax.ShapeDtypeStruct(shape, jnp.bool, sharding=rows)
    batch = {"tokens": ids, "targets": ids, "seq_idx": ids, "loss_mask": mask}
    with jax.set_mesh(mesh):
        lowered = make_train_step(config).lower(state, batch)
        compiled = lowered.compile(_OFFLINE | (options or {}))
    return state, compiled


@functools.cache
def _h200s() -> list[jax.Device]:
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x8", target_config=TARGET)
    return topology.devices


def _bytes_per_device(tree) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
