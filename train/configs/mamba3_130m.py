# SPDX-License-Identifier: Apache-2.0
"""Mamba-3 of 130M parameters (24 layers of width 768) on your own text, for one GPU.

    python -m train mamba3_130m --data.train 'corpus/*.jsonl' --data.tokenizer tokenizer.json

The tokenizer is GPT-NeoX's (50277 ids); arrays of its tokens work too: --data.train tokens.npy.
32 768 tokens a step, bf16 activations, fp32 weights.
"""

from mamba_jax.config import MambaConfig
from train.config import DataConfig, OptimizerConfig, TrainConfig


def config() -> TrainConfig:
    """The 130M model with Mamba-3 layers."""
    return TrainConfig(
        name="mamba3-130m",
        model=MambaConfig(
            d_model=768,
            n_layer=24,
            vocab_size=50277,
            ssm_cfg={"layer": "Mamba3"},
            pad_vocab_size_multiple=16,
        ),
        data=DataConfig(tokenizer="none", end_id=0, seq_len=2048, batch_size=16),
        optimizer=OptimizerConfig(learning_rate=1.8e-3, warmup_steps=1000),
        steps=76_000,
        compute_dtype="bfloat16",
    )
