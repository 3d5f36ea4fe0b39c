# SPDX-License-Identifier: Apache-2.0
"""The smallest run that has everything: two layers, three documents' worth of text, a few steps."""

import dataclasses
from pathlib import Path

from mamba_jax.config import MambaConfig
from train.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    MeshConfig,
    OptimizerConfig,
    SampleConfig,
    TrainConfig,
)

MODEL = MambaConfig(
    d_model=16,
    n_layer=2,
    vocab_size=257,
    ssm_cfg={"layer": "Mamba2", "d_state": 8, "headdim": 8, "chunk_size": 16},
)

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=2, schedule="constant")


def write_text(directory: Path) -> str:
    """Writes a directory of small text files and returns its path."""
    folder = directory / "text"
    folder.mkdir()
    for number in range(12):
        line = f"document {number} repeats itself, as documents do.\n"
        (folder / f"{number:02}.txt").write_text(line * (number + 1))
    return str(folder)


def config(directory: Path, text: str, **changes) -> TrainConfig:
    """A run of eight steps in `directory`/run; `changes` replace fields."""
    run = TrainConfig(
        model=MODEL,
        data=DataConfig(train=(text,), seq_len=32, batch_size=4, validation_fraction=0.1),
        optimizer=OPTIMIZER,
        evaluation=EvaluationConfig(every=0, batches=2),
        checkpoint=CheckpointConfig(every=3, keep=2),
        sample=SampleConfig(tokens=0),
        # The tests' process has eight devices; most runs need one.
        mesh=MeshConfig(data=1),
        output=str(directory / "run"),
        steps=8,
        log_every=4,
    )
    return dataclasses.replace(run, **changes)
