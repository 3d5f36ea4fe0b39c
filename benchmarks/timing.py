# SPDX-License-Identifier: Apache-2.0
"""Timing of jitted functions, and what a result file says about where it was made."""

import datetime
import json
import pathlib
import statistics
import sys
import time

import jax

RESULTS = pathlib.Path(__file__).parent / "results"


def milliseconds(function, *arguments, calls: int = 20, repeats: int = 5) -> float:
    """Median over `repeats` of the time per call of `calls` calls in a row, warmed up."""
    jax.block_until_ready(function(*arguments))
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            out = function(*arguments)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / calls)
        del out
    return 1e3 * statistics.median(times)


def circumstances() -> dict:
    """Card, versions, date and command line."""
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "platform": jax.devices()[0].client.platform_version.replace("\n", " "),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", _module_name(), *sys.argv[1:]]),
    }


def save(path: pathlib.Path, results: dict) -> None:
    """Writes results with their circumstances as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**circumstances(), **results}, indent=1) + "\n")


def _module_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else pathlib.Path(sys.argv[0]).stem
