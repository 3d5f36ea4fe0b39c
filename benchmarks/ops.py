# SPDX-License-Identifier: Apache-2.0
"""The scans beside other implementations of them: time, compile time, temporary memory.

    python -m benchmarks.ops                                  on a CPU
    python -m benchmarks.ops --torch-python PATH              HF transformers too (hf_torch.py)
    python -m benchmarks.ops --rows h200                      the XLA path on a GPU, large shapes

Peers in JAX are the PyPI packages mamba2-jax and mamba3-jax, and for Mamba-1, which neither has,
`jax.lax.associative_scan` over the whole sequence. All candidates of a row are timed in turns, call
by call, in one process, on the same arrays; a row reports the median wall time, and the least
processor time, which other processes disturb less.
"""

import argparse
import functools
import json
import statistics
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import RESULTS, save
from pallas_kernels import explain, mamba3_scan, selective_scan, ssd
from pallas_kernels.mamba3_scan import shapes as mamba3_shapes
from pallas_kernels.selective_scan import shapes as selective_scan_shapes
from pallas_kernels.ssd import shapes as ssd_shapes

ROWS = {
    "cpu": (("ssd", "cpu"), ("selective_scan", "cpu"), ("mamba3_scan", "cpu_siso_b2_t1024_h24")),
    "h200": (
        *(
            ("ssd", name)
            for name in ("mamba2_1.3b", "mamba2_2.7b", "mamba2_130m", "mamba2_1.3b_long")
        ),
        *(("selective_scan", name) for name in ("mamba1_1.4b", "mamba1_130m", "mamba1_1.4b_long")),
        *(("mamba3_scan", name) for name in mamba3_shapes.BENCHMARKS if not name.startswith("cpu")),
    ),
}


def keys():
    """Yields random keys for ever."""
    key = jax.random.key(0)
    while True:
        key, one = jax.random.split(key)
        yield one


def ssd_candidates(b, t, h, p, g, n, dtype):
    """Arguments of the Mamba-2 scan, and functions of them that compute it."""
    k = keys()
    normal = functools.partial(jax.random.normal, dtype=dtype)
    arguments = {
        "x": normal(next(k), (b, t, h, p)),
        "dt": normal(next(k), (b, t, h)) * 0.5 - 3,
        "A": -jnp.exp(jax.random.uniform(next(k), (h,)) * 2.7),
        "B": normal(next(k), (b, t, g, n)),
        "C": normal(next(k), (b, t, g, n)),
        "D": jax.random.normal(next(k), (h,)),
        "dt_bias": jax.random.normal(next(k), (h,)) * 0.1,
    }

    def ours(arguments, implementation="xla"):
        return ssd(**arguments, dt_softplus=True, implementation=implementation)[0]

    def mamba2_jax(arguments):
        from mamba2_jax.modeling import ssd_forward

        x, dt, A, B, C, D, dt_bias = map(arguments.get, ("x", "dt", "A", "B", "C", "D", "dt_bias"))
        B, C = (jnp.broadcast_to(m, (b, t, h, n)) for m in (B, C))
        return ssd_forward(x, dt, A, B, C, 64, D, dt_bias, 0.0, 1e9)[0]

    return arguments, {"ours": ours, "mamba2-jax": mamba2_jax}


def selective_scan_candidates(b, t, e, n, g, dtype):
    """Arguments of the Mamba-1 scan, and functions of them that compute it."""
    k = keys()
    normal = functools.partial(jax.random.normal, dtype=dtype)
    arguments = {
        "x": normal(next(k), (b, t, e)),
        "dt": normal(next(k), (b, t, e)) * 0.5 - 3,
        "A": -jnp.tile(jnp.arange(1.0, n + 1), (e, 1)),
        "B": normal(next(k), (b, t, n)),
        "C": normal(next(k), (b, t, n)),
        "D": jnp.ones((e,)),
        "z": normal(next(k), (b, t, e)),
        "dt_bias": jax.random.normal(next(k), (e,)) * 0.1,
    }

    def ours(arguments, implementation="xla"):
        return selective_scan(**arguments, dt_softplus=True, implementation=implementation)[0]

    def associative(arguments):
        names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")
        x, dt, A, B, C, D, z, dt_bias = map(arguments.get, names)
        step = jax.nn.softplus(dt.astype(jnp.float32) + dt_bias[None, None])[..., None]
        decay = jnp.exp(step * A[None, None])
        added = step * x[..., None] * B[:, :, None]
        _, state = jax.lax.associative_scan(
            lambda l, r: (l[0] * r[0], r[0] * l[1] + r[1]), (decay, added), axis=1
        )
        y = jnp.einsum("bten,btn->bte", state, C.astype(jnp.float32)) + D[None, None] * x
        return (y * jax.nn.silu(z)).astype(x.dtype)

    return arguments, {"ours": ours, "associative_scan": associative}


def mamba3_candidates(b, t, h, p, g, n, a, r, dtype):
    """Arguments of the Mamba-3 scan, and functions of them that compute it; the peer is SISO."""
    k = keys()
    normal = functools.partial(jax.random.normal, dtype=dtype)
    dt = jnp.exp(jax.random.uniform(next(k), (b, t, h), minval=np.log(1e-3), maxval=np.log(0.1)))
    arguments = {
        "x": normal(next(k), (b, t, h, p)),
        "dt": dt,
        "log_decay": -dt * (1 + jnp.abs(jax.random.normal(next(k), (b, t, h)))),
        "B": normal(next(k), (b, t, r, g, n)),
        "C": normal(next(k), (b, t, r, g, n)),
        "trap": normal(next(k), (b, t, h)),
        "angles": normal(next(k), (b, t, h, a)),
        "B_bias": jnp.ones((h, r, n)),
        "C_bias": jnp.ones((h, r, n)),
        "D": jnp.ones((h,)),
        "z": normal(next(k), (b, t, h, p)),
    }
    if r > 1:
        arguments |= {
            name: jnp.full((h, r, p), 1 / r, jnp.float32) for name in ("mimo_x", "mimo_z", "mimo_o")
        }

    def ours(arguments, implementation="xla"):
        return mamba3_scan(**arguments, implementation=implementation)[0]

    def mamba3_jax(arguments):
        from mamba3_jax import modeling

        v = arguments
        B = jnp.repeat(v["B"][:, :, 0], h // g, axis=2) + v["B_bias"][None, None, :, 0]
        C = jnp.repeat(v["C"][:, :, 0], h // g, axis=2) + v["C_bias"][None, None, :, 0]
        trap = jax.nn.sigmoid(v["trap"])

        def later(array):
            return jnp.pad(array[:, 1:], ((0, 0), (0, 1), (0, 0)))

        scale = v["dt"] * trap + later(v["dt"]) * (1 - later(trap))
        skip = v["dt"] * trap * jnp.sum(C * B, axis=-1)
        angle = modeling.cumulative_angles(v["angles"], v["dt"], init_state=None, cu_seqlens=None)
        turned = (jnp.cos(angle), jnp.sin(angle))
        y, _ = modeling.ssd_forward(
            x=v["x"],
            q=modeling.apply_rope_pairwise(C, *turned),
            k=modeling.apply_rope_pairwise(B, *turned),
            adt=v["log_decay"],
            scale=scale,
            skip=skip,
            D=v["D"],
            chunk_size=64,
            initial_states=None,
            return_final_states=True,
        )
        return y * jax.nn.silu(v["z"])

    return arguments, {"ours": ours, "mamba3-jax": mamba3_jax}


def shape_of(op: str, row: str) -> dict[str, int]:
    """Sizes of a named workload."""
    if op == "ssd":
        return ssd_shapes.SHAPES[row]
    if op == "selective_scan":
        return selective_scan_shapes.SHAPES[row]
    return mamba3_shapes.BENCHMARKS[row].__dict__


CANDIDATES = {
    "ssd": ssd_candidates,
    "selective_scan": selective_scan_candidates,
    "mamba3_scan": mamba3_candidates,
}


def measure(op: str, row: str, dtype, rounds: int, only_ours: bool) -> dict:
    """Times every candidate of one row, forward and forward with backward."""
    shape = shape_of(op, row)
    arguments, functions = CANDIDATES[op](**shape, dtype=dtype)
    if only_ours:
        functions = {"ours": functions["ours"]}
    chosen = explain(functools.partial(functions["ours"], implementation=None), arguments)
    weight = jax.random.normal(jax.random.key(9), arguments["x"].shape)
    programs, report = {}, {}
    for name, function in functions.items():
        backward = jax.value_and_grad(lambda a, f=function: jnp.sum(f(a) * weight))
        for kind, program in (("fwd", function), ("fwd+bwd", backward)):
            start = time.perf_counter()
            compiled = jax.jit(program).lower(arguments).compile()
            report.setdefault(name, {})[kind] = {
                "compile_s": round(time.perf_counter() - start, 2),
                "temporary_mib": round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1),
            }
            programs[name, kind] = compiled
            value = jax.block_until_ready(compiled(arguments))
            if kind == "fwd":
                ours_y = value if name == "ours" else ours_y
                # A peer that computes something else is no peer.
                difference = jnp.linalg.norm(value - ours_y) / jnp.linalg.norm(ours_y)
                report[name][kind]["difference_from_ours"] = float(difference)
    wall = {key: [] for key in programs}
    processor = {key: [] for key in programs}
    for _ in range(rounds):
        for key, program in programs.items():
            start, start_processor = time.perf_counter(), time.process_time()
            jax.block_until_ready(program(arguments))
            wall[key].append(1e3 * (time.perf_counter() - start))
            processor[key].append(1e3 * (time.process_time() - start_processor))
    for (name, kind), times in wall.items():
        report[name][kind]["ms"] = round(statistics.median(times), 3)
        report[name][kind]["processor_ms"] = round(min(processor[name, kind]), 3)
    return {
        "shape": shape,
        "dtype": jnp.dtype(dtype).name,
        "explain": str(chosen),
        "candidates": report,
    }


def main() -> None:
    """Measures the rows asked for, prints and writes them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", choices=sorted(ROWS), default="cpu")
    parser.add_argument("--only", default="", help="rows whose op and name contain this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--torch-python", help="a Python with torch and transformers")
    parser.add_argument("--out", type=Path, default=RESULTS / "ops.json")
    options = parser.parse_args()
    on_gpu = options.rows == "h200"
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    results = {}
    for op, row in ROWS[options.rows]:
        if options.only not in f"{op} {row}":
            continue
        results[f"{op} {row}"] = found = measure(op, row, dtype, options.rounds, on_gpu)
        print(op, found["shape"], found["dtype"])
        print("  what a call without `implementation` runs here:", found["explain"])
        for name, kinds in found["candidates"].items():
            for kind, numbers in kinds.items():
                print(f"  {name:18} {kind:8} {numbers}", flush=True)
        # Row by row: a run cut short keeps what it has measured.
        save(options.out, {"unit": "ms", "rows": results})
    if options.torch_python:
        script = Path(__file__).parent / "hf_torch.py"
        output = subprocess.run(
            [options.torch_python, str(script)], check=True, capture_output=True, text=True
        ).stdout
        results["HF transformers, torch"] = json.loads(output)
        print(output)
        save(options.out, {"unit": "ms", "rows": results})


if __name__ == "__main__":
    main()
