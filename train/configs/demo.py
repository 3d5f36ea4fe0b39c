# SPDX-License-Identifier: Apache-2.0
"""A small byte-level model of the Python standard library's own source, in about two minutes.

    python -m train demo
    python -m train demo --layer Mamba1        (or Mamba3)

Runs on a laptop's CPU without a network. Expected: validation bits per byte from 8 to below 3.
"""

from mamba_jax.config import MambaConfig
from train.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    SampleConfig,
    TrainConfig,
)

_MIXER_OPTIONS = {
    "Mamba1": {"d_state": 16},
    "Mamba2": {"d_state": 32, "headdim": 32, "chunk_size": 64},
    "Mamba3": {"d_state": 32, "headdim": 32, "chunk_size": 64},
}
# Below 3 bits per byte: Mamba-1 and Mamba-2 after 100 steps, Mamba-3 after more than 150.
_STEPS = {"Mamba1": 300, "Mamba2": 300, "Mamba3": 400}


def config(layer: str = "Mamba2") -> TrainConfig:
    """The demo with "Mamba1", "Mamba2" or "Mamba3" layers."""
    return TrainConfig(
        name=f"demo-{layer.lower()}",
        overwrite=True,
        model=MambaConfig(
            d_model=128,
            n_layer=4,
            vocab_size=257,
            ssm_cfg={"layer": layer, **_MIXER_OPTIONS[layer]},
        ),
        data=DataConfig(train=("python-stdlib",), seq_len=256, batch_size=4),
        optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=20),
        evaluation=EvaluationConfig(every=50, batches=10),
        checkpoint=CheckpointConfig(every=100, keep=2),
        sample=SampleConfig(prompt="def ", tokens=400, seed=3),
        steps=_STEPS[layer],
        log_every=25,
    )
