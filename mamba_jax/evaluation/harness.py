# SPDX-License-Identifier: Apache-2.0
"""A model of this library in lm-eval, under the name "mamba_jax".

import lm_eval, mamba_jax.evaluation.harness
lm_eval.simple_evaluate("mamba_jax", model_args="pretrained=DIRECTORY", tasks=["lambada_openai"])

Needs the lm-eval package: pip install 'mamba_jax[eval]'.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from mamba_jax.checkpoint.pretrained import from_pretrained, local_files
from mamba_jax.evaluation.scoring import log_likelihoods
from mamba_jax.generation.text import Tokenizer, generate_text, load_tokenizer
from mamba_jax.model import MambaLMHeadModel


@register_model("mamba_jax")
class HarnessModel(TemplateLM):
    """What lm-eval asks of a model: log-likelihoods, whole texts' too, and generation.

    Args:
      pretrained: A directory or hub id, or a model.
      tokenizer: "bytes", a tokenizer.json, or a tokenizer; the checkpoint's own when None.
      dtype: Compute dtype and that of the weights.
      batch_size: Requests at a time.
      chunk: Tokens read at a time.
      max_gen_toks: New tokens at most, where a task does not say.
      revision: Of the hub id.
      seed: Of the random draws of tasks that sample.
    """

    def __init__(
        self,
        pretrained: str | MambaLMHeadModel,
        *,
        tokenizer: str | Tokenizer | None = None,
        dtype: str = "bfloat16",
        batch_size: int | str = 8,
        chunk: int = 512,
        max_gen_toks: int = 256,
        revision: str | None = None,
        seed: int = 0,
        device: str | None = None,
        max_batch_size: int | None = None,
    ):
        # lm-eval hands `device` and `max_batch_size` to every model; JAX has its own devices.
        del device, max_batch_size
        super().__init__()
        if isinstance(pretrained, str):
            files = local_files(pretrained, revision=revision)
            self.model = from_pretrained(files.directory, dtype=jnp.dtype(dtype))
            tokenizer = tokenizer or files.directory
        else:
            self.model = pretrained
        if tokenizer is None:
            raise ValueError("tokenizer must be given with a model; got None")
        is_name = isinstance(tokenizer, str | Path)
        self.text_tokenizer = load_tokenizer(tokenizer) if is_name else tokenizer
        self.batch_size = 8 if batch_size == "auto" else int(batch_size)
        self.chunk, self.max_gen_toks = int(chunk), int(max_gen_toks)
        self.key = jax.random.key(int(seed))

    @property
    def eot_token_id(self) -> int:
        """What precedes a text without a context."""
        return 0 if self.text_tokenizer.end_id is None else self.text_tokenizer.end_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids of a string; special tokens are never added."""
        return list(self.text_tokenizer.encode(string))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        return self._score(pairs)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihoods of whole texts, each token given everything before it."""
        texts = [self.tok_encode(request.args[0]) for request in requests]
        return [nats for nats, _ in self._score([([self.eot_token_id], ids) for ids in texts])]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continues each request's text until one of its stop strings."""
        results: list[str] = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        for members in groups.values():
            for start in range(0, len(members), self.batch_size):
                part = members[start : start + self.batch_size]
                prompts = [requests[index].args[0] for index in part]
                texts = self._continue(prompts, requests[part[0]].args[1])
                for index, text in zip(part, texts, strict=True):
                    results[index] = text
        return results

    def _score(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[tuple[float, bool]]:
        return log_likelihoods(self.model, pairs, batch_size=self.batch_size, chunk=self.chunk)

    def _continue(self, prompts: list[str], options: dict[str, Any]) -> list[str]:
        until = options.get("until") or []
        draws = options.get("do_sample", float(options.get("temperature") or 0) > 0)
        temperature = float(options.get("temperature") or 1.0) if draws else 0.0
        return generate_text(
            self.model,
            self.text_tokenizer,
            prompts,
            stop=[until] if isinstance(until, str) else list(until),
            max_new_tokens=int(options.get("max_gen_toks", self.max_gen_toks)),
            temperature=temperature,
            top_k=int(options.get("top_k") or 0),
            top_p=float(options.get("top_p") or 1.0),
            key=self.key,
            prefill_chunk=self.chunk,
        )
