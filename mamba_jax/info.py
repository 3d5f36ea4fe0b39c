# SPDX-License-Identifier: Apache-2.0
"""`python -m mamba_jax.info`: this machine, the kernels it can run, what is missing."""

import importlib.metadata
import importlib.util
import platform
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_jax.cache import ModelCache, init_cache
from mamba_jax.config import MambaConfig
from mamba_jax.model import MambaLMHeadModel
from mamba_jax.partitioning.sharded_ops import explain

# Package → the extra of mamba_jax that brings it, and what for.
_OPTIONAL = {
    "jax_triton": ("cuda", "kernels for CUDA and ROCm GPUs other than Hopper"),
    "optax": ("train", "training"),
    "grain": ("train", "training data"),
    "orbax.checkpoint": ("train", "checkpoints of training runs"),
    "safetensors": ("hf", "reading and writing published weights"),
    "tokenizers": ("hf", "tokenizer files"),
    "huggingface_hub": ("hf", "models by their hub id"),
    "lm_eval": ("eval", "the standard evaluation harness"),
}


def report() -> str:
    """Returns the text that `python -m mamba_jax.info` prints."""
    lines = [f"python {platform.python_version()} on {platform.platform()}"]
    lines += [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "flax")]
    lines.append("")
    lines += [f"device {device.id}: {device.device_kind}" for device in jax.devices()]
    lines.append("")
    lines.append("what each operation runs as here (bfloat16, typical sizes):")
    for operation, decision in _decisions().items():
        lines.append(f"  {operation}: {decision.chosen}")
        lines += [f"    not {name}: {reason}" for name, reason in decision.refused.items()]
    missing = {
        name: about for name, about in _OPTIONAL.items() if not _is_installed(name.split(".")[0])
    }
    lines.append("")
    lines.append("optional packages that are missing:" if missing else "nothing is missing")
    for name, (extra, purpose) in missing.items():
        lines.append(f"  {name} ({purpose}): pip install 'mamba_jax[{extra}]'")
    return "\n".join(lines)


def _decisions() -> dict[str, Any]:
    """Operation → the choice made for it in a small model of each kind, nothing being run."""
    decisions = {}
    for kind in ("Mamba1", "Mamba2", "Mamba3"):
        config = MambaConfig(d_model=768, n_layer=1, ssm_cfg={"layer": kind})
        model, cache = jax.eval_shape(partial(_model_and_cache, config))
        for time in (1024, 1):
            explanation = explain(
                lambda lm, ids, cache: lm(ids, cache=cache),
                model,
                jax.ShapeDtypeStruct((2, time), jnp.int32),
                cache,
            )
            decisions |= {decision.operation: decision for decision in explanation.decisions}
    return decisions


def _model_and_cache(config: MambaConfig) -> tuple[MambaLMHeadModel, ModelCache]:
    return MambaLMHeadModel(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16), init_cache(config, 2)


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


if __name__ == "__main__":
    print(report())
