# SPDX-License-Identifier: Apache-2.0
"""Text written by a trained model."""

import jax

from mamba_jax.generation import generate
from train.config import TrainConfig
from train.step import model_with
from train.tokenizer import ByteTokenizer, JsonTokenizer


def write_sample(
    config: TrainConfig, params: dict, tokenizer: ByteTokenizer | JsonTokenizer
) -> str:
    """Continues `config.sample.prompt` as if it began a document; the same text every time."""
    sample = config.sample
    prompt = [tokenizer.end_id, *tokenizer.encode(sample.prompt.encode()).tolist()]
    generation = generate(
        model_with(config, params),
        [prompt],
        max_new_tokens=sample.tokens,
        temperature=sample.temperature,
        top_p=sample.top_p,
        eos_token_id=tokenizer.end_id,
        key=jax.random.key(sample.seed),
    )
    return tokenizer.decode(generation.row(0))
