# SPDX-License-Identifier: Apache-2.0
"""Text from a model: `generate` for token ids, `generate_text` for strings.

`generate.py` is the public function, `prompts.py` brings prompts into one form, `decoding.py` is
what runs compiled on the device, `sampling.py` turns logits into tokens, `text.py` adds tokenizers
and stop strings.
"""

from mamba_jax.generation.decoding import GenerationState
from mamba_jax.generation.generate import Generation, fork_cache, generate
from mamba_jax.generation.text import generate_text, load_tokenizer

__all__ = [
    "Generation",
    "GenerationState",
    "fork_cache",
    "generate",
    "generate_text",
    "load_tokenizer",
]
