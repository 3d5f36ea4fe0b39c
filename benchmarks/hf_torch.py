# SPDX-License-Identifier: Apache-2.0
"""HF transformers' mixers on torch's CPU path, at the sizes of benchmarks/ops.py; prints JSON.

Run by a Python that has torch and transformers; imports nothing of this project. The mixers' scans
cannot be called alone, so their projections are timed with them; these are a small share.
"""

import json
import statistics
import time

import torch
from transformers import Mamba2Config, MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

BATCH, TIME, D_MODEL = 2, 1024, 768


def measure(mixer, rounds: int = 3) -> dict:
    """Median times in ms of a mixer's forward, and forward with backward."""
    x = torch.randn(BATCH, TIME, D_MODEL, requires_grad=True)
    weight = torch.randn(BATCH, TIME, D_MODEL)
    times = {"fwd": [], "fwd+bwd": []}
    for _ in range(rounds):
        start = time.perf_counter()
        with torch.no_grad():
            mixer(x)
        times["fwd"].append(1e3 * (time.perf_counter() - start))
        start = time.perf_counter()
        (mixer(x) * weight).sum().backward()
        times["fwd+bwd"].append(1e3 * (time.perf_counter() - start))
    return {kind: {"ms": round(statistics.median(found), 1)} for kind, found in times.items()}


def main() -> None:
    """Measures both mixers."""
    torch.manual_seed(0)
    mamba = MambaConfig(hidden_size=D_MODEL, state_size=16, num_hidden_layers=1)
    mamba2 = Mamba2Config(
        hidden_size=D_MODEL, state_size=128, num_heads=24, head_dim=64, n_groups=1
    )
    results = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "Mamba-1 mixer": measure(MambaMixer(mamba, layer_idx=0)),
        "Mamba-2 mixer": measure(Mamba2Mixer(mamba2, layer_idx=0)),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
