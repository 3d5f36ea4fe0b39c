# SPDX-License-Identifier: Apache-2.0
"""What a mesh changes: errors against one device, collectives, memory per device, overlap.

    python -m benchmarks.partitioning [--only PART ...] [--mixer NAME ...]

errors        every combination of axis sizes 1, 2, 4, 8 on at most eight CPU devices, every mixer:
              logits, gradients and one AdamW step against those of one device, fp32
collectives   those of one layer, counted in its compiled program
memory        bytes per GPU of a train step of mamba2-2.7b, as the compiler for the H200 plans them
overlap       what that compiler runs between the start and the end of each collective

The last two compile for GPUs that need not be there, with the CUDA plugin of JAX (`jax[cuda13]`).
Results go to results/partitioning.json part by part, cell by cell; cells already there are kept.
"""

import argparse
import itertools
import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks import partitioning_programs as programs
from benchmarks import timing
from mamba_jax import MambaConfig, MambaLMHeadModel, make_mesh, shard_model

PARTS = ("errors", "collectives", "memory", "overlap")
RESULTS = timing.RESULTS / "partitioning.json"
AXES = ("data", "fsdp", "tensor", "sequence")
BATCH, TIME, VOCAB = 8, 16, 64

_ATTENTION = {"num_heads": 8, "num_heads_kv": 4, "causal": True, "rotary_emb_dim": 4, "d_conv": 3}
_MAMBA2 = {"layer": "Mamba2", "d_state": 6, "headdim": 8, "ngroups": 2}
_MAMBA3 = {"layer": "Mamba3", "d_state": 8, "headdim": 8}
_TINY = {"d_model": 32, "n_layer": 2, "vocab_size": VOCAB}
MODELS = {
    "Mamba1": MambaConfig(**_TINY, ssm_cfg={"layer": "Mamba1", "d_state": 4}),
    "Mamba2": MambaConfig(**_TINY, ssm_cfg=_MAMBA2),
    "Mamba3 SISO": MambaConfig(**_TINY, ssm_cfg=_MAMBA3 | {"ngroups": 2}),
    "Mamba3 MIMO": MambaConfig(**_TINY, ssm_cfg=_MAMBA3 | {"is_mimo": True, "mimo_rank": 2}),
    "hybrid": MambaConfig(
        **_TINY,
        d_intermediate=128,
        ssm_cfg=_MAMBA2,
        attn_layer_idx=(1,),
        attn_cfg=_ATTENTION,
    ),
}


def main() -> None:
    """Measures the parts asked for and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--mixer", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    options = parser.parse_args()
    # GPUs are only compiled for.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_default_matmul_precision", "highest")
    for part in options.only:
        {
            "errors": lambda: _errors(options.mixer),
            "collectives": lambda: _collectives(options.mixer),
            "memory": lambda: _programs("memory", programs.memory_meshes(), programs.memory),
            "overlap": lambda: _programs("overlap", programs.OVERLAP_MESHES, programs.overlap),
        }[part]()


def combinations() -> list[dict[str, int]]:
    """Every mesh of axis sizes 1, 2, 4, 8 with two to eight devices, the largest first."""
    sizes = itertools.product((1, 2, 4, 8), repeat=len(AXES))
    meshes = [dict(zip(AXES, s, strict=True)) for s in sizes if 1 < math.prod(s) <= 8]
    return sorted(meshes, key=lambda mesh: -math.prod(mesh.values()))


def mesh_name(sizes: dict[str, int]) -> str:
    """The axes larger than 1, as "fsdp 2 · tensor 4"."""
    return " · ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"


def _errors(mixers) -> None:
    # Compiling is nearly all of the work; what is left out are LLVM's passes, not XLA's.
    jax.config.update("jax_disable_most_optimizations", True)
    known = _read("errors")
    tokens = jax.random.randint(jax.random.key(2), (BATCH, TIME + 1), 0, VOCAB, jnp.int32)
    alone = {}
    for sizes, name in itertools.product(combinations(), mixers):
        if mesh_name(sizes) in known.get(name, {}):
            continue
        start = time.perf_counter()
        if name not in alone:
            model = _shaken(MODELS[name])
            alone[name] = model, _train(model, tokens)
        model, wanted = alone[name]
        mesh = make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
        with jax.set_mesh(mesh):
            got = _train(shard_model(model, mesh), tokens)
        found = {key: _max_error(got[key], wanted[key]) for key in wanted}
        known.setdefault(name, {})[mesh_name(sizes)] = found
        _write("errors", known, jax_cpu_devices=8)
        seconds = time.perf_counter() - start
        shown = ", ".join(f"{key} {error:.1e}" for key, error in found.items())
        print(f"{mesh_name(sizes)}, {name}: {shown} ({seconds:.0f} s)", flush=True)


def _train(model: MambaLMHeadModel, tokens: jax.Array) -> dict:
    """Logits, gradients, and the parameters after one step of AdamW, on the host."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adamw(1e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)

    def loss(params, tokens):
        logits = nnx.merge(graph, params, rest)(tokens[:, :-1])
        nats = optax.softmax_cross_entropy(logits, jax.nn.one_hot(tokens[:, 1:], VOCAB))
        return jnp.mean(nats), logits

    @jax.jit
    def step(params, tokens):
        (_, logits), grads = jax.value_and_grad(loss, has_aux=True)(params, tokens)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return {
            "logits": logits,
            "gradients": nnx.to_pure_dict(grads),
            "step": nnx.to_pure_dict(optax.apply_updates(params, updates)),
        }

    return jax.device_get(step(params, tokens))


def _max_error(got, wanted) -> float:
    """The largest max|got - wanted| / max|wanted| of any array."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    return max(float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in pairs)


def _shaken(config: MambaConfig) -> MambaLMHeadModel:
    """A model whose parameters are all away from their special initial values (0 and 1)."""
    graph, state = nnx.split(MambaLMHeadModel(config, rngs=nnx.Rngs(0)))
    leaves, structure = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [
        leaf + 0.1 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return nnx.merge(graph, jax.tree.unflatten(structure, moved))


def _collectives(mixers) -> None:
    known = _read("collectives")
    for name, sizes in itertools.product(mixers, programs.LAYER_MESHES):
        if name == "hybrid" or mesh_name(sizes) in known.get(name, {}):
            continue
        mesh = make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
        known.setdefault(name, {})[mesh_name(sizes)] = found = {
            "forward": programs.layer_collectives(_shaken(MODELS[name]), mesh, gradient=False),
            "with gradient": programs.layer_collectives(_shaken(MODELS[name]), mesh, gradient=True),
        }
        _write("collectives", known)
        print(f"{mesh_name(sizes)}, {name}: {found}", flush=True)


def _programs(part: str, meshes, compile_one) -> None:
    known = _read(part)
    for sizes in meshes:
        if mesh_name(sizes) in known:
            continue
        start = time.perf_counter()
        known[mesh_name(sizes)] = found = compile_one(sizes)
        _write(part, known, **programs.WORK)
        print(f"{mesh_name(sizes)}: {found} ({time.perf_counter() - start:.0f} s)", flush=True)


def _read(part: str) -> dict:
    return (
        json.loads(RESULTS.read_text()).get(part, {}).get("cells", {}) if RESULTS.exists() else {}
    )


def _write(part: str, cells: dict, **facts) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[part] = {**timing.circumstances(), **facts, "cells": cells}
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
