# SPDX-License-Identifier: Apache-2.0
"""Where a jitted function's time goes: the profiler's list of kernels with their durations."""

import collections
import glob
import gzip
import json
import tempfile

import jax


def kernel_times(function, *arguments, calls: int = 5) -> list[tuple[str, float, int]]:
    """Returns (kernel, microseconds per call, launches per call), longest first."""
    jax.block_until_ready(function(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                out = function(*arguments)
            jax.block_until_ready(out)
        (path,) = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"
    }
    total, count = collections.Counter(), collections.Counter()
    for event in events:
        if event.get("ph") != "X" or "GPU" not in names.get(event["pid"], ""):
            continue
        if "Stream" not in threads.get((event["pid"], event["tid"]), ""):
            continue
        total[event["name"]] += event["dur"] / calls
        count[event["name"]] += 1
    return [(name, time, count[name] // calls) for name, time in total.most_common()]


def print_kernel_times(title: str, function, *arguments) -> None:
    """Prints `kernel_times` and their sum."""
    times = kernel_times(function, *arguments)
    print(f"{title}: {sum(t for _, t, _ in times):.1f} us in kernels")
    for name, time, launches in times[:16]:
        print(f"  {time:9.1f} us  x{launches}  {name[:90]}", flush=True)
