# SPDX-License-Identifier: Apache-2.0
"""Compiles every Mosaic GPU kernel for the H200 on a machine without a GPU, and reads the result.

    python -m benchmarks.kernels_check [WORDS ...]      only kernels whose names hold all the words

Fails when a kernel spills more registers than its budget, needs more shared memory than there is,
has its wgmma instructions serialised by the compiler, has none, or loads single 16-bit numbers
from device memory. Needs the CUDA plugin of JAX (`jax[cuda13]`) for its compiler, no driver.
An op adds its kernels by a module with `cases()` in MODULES.
"""

import glob
import importlib
import os
import pathlib
import re
import sys
import tempfile

MODULES = ("benchmarks.kernel_cases_ssd",)
SHARED_MEMORY = 227 * 1024
# What the compiler asks of a card, from NVIDIA's data sheet of the H200.
TARGET = """
gpu_device_info {
  name: "NVIDIA H200"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  device_memory_size: 150000000000
  l2_cache_size: 52428800
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def main() -> int:
    """Prints a line per kernel; returns the number of failures."""
    folder = tempfile.mkdtemp(prefix="kernels")
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "MOSAIC_GPU_DUMP_TO": folder,
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_PTX": "1",
    }
    sharding = _target_sharding()
    failures = 0
    for module in MODULES:
        for case in importlib.import_module(module).cases():
            if not all(word in case.name for word in sys.argv[1:]):
                continue
            facts, problems = _check(case, sharding, pathlib.Path(folder))
            failures += bool(problems)
            print("FAIL" if problems else "ok  ", case.name, facts, *problems, flush=True)
    print(f"{failures} kernels failed" if failures else "all kernels pass")
    return failures


def _target_sharding():
    import jax
    from jax.experimental import topologies

    jax.devices()
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=TARGET)
    mesh = topologies.make_mesh(topology, (1,), ("device",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def _check(case, sharding, folder: pathlib.Path):
    """Compiles one case; returns what was found and what is wrong with it."""
    import jax

    for path in folder.iterdir():
        path.unlink()
    arguments = [
        argument and jax.ShapeDtypeStruct(*argument, sharding=sharding)
        for argument in case.arguments
    ]
    try:
        jax.jit(case.function).lower(*arguments).compile()
    except Exception as error:  # Any failure to compile is a finding.
        return {}, [f"does not compile: {type(error).__name__}: {str(error)[-400:]}"]
    report, ptx, resources = (_read(folder, end) for end in ("ptxas", "ptx", "resources.txt"))
    if not ptx or not report:
        return {}, ["the compiler left no report"]
    facts = {
        "registers": max(int(number) for number in re.findall(r"Used (\d+) registers", report)),
        "spill_bytes": sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", report)),
        "shared_memory": sum(int(n) for n in re.findall(r"smem_scratch_bytes=(\d+)", resources)),
        "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
        "scalar_loads": len(re.findall(r"ld\.global(?:\.nc)?\.[bu]16", ptx)),
    }
    problems = []
    if facts["spill_bytes"] > case.spill_bytes:
        problems.append(f"spills {facts['spill_bytes']} bytes, may {case.spill_bytes}")
    if facts["shared_memory"] > SHARED_MEMORY:
        problems.append("too much shared memory")
    if case.tensor_cores and not facts["wgmma"]:
        problems.append("no wgmma")
    if re.search(r"wgmma.*serializ", report):
        problems.append("wgmma serialised")
    if facts["scalar_loads"]:
        problems.append("loads single 16-bit numbers")
    return facts, problems


def _read(folder: pathlib.Path, end: str) -> str:
    return "".join(pathlib.Path(p).read_text() for p in sorted(glob.glob(f"{folder}/*.{end}")))


if __name__ == "__main__":
    sys.exit(main())
