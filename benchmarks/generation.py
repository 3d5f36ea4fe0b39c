# SPDX-License-Identifier: Apache-2.0
"""The original's generation benchmark with its options; prefill speed; memory over context.

    python -m benchmarks.generation --model state-spaces/mamba2-130m --tokenizer tokenizer.json \\
        --prompt "My cat wrote all this" --topp 0.9 --temperature 0.7 --repetition-penalty 1.2
    python -m benchmarks.generation --model random:mamba2-2.7b --batch 64 --state-dtype bfloat16
    python -m benchmarks.generation --model random:mamba2-2.7b --prefill 2048 16384 131072
    python -m benchmarks.generation --model random:mamba2-130m --contexts 4096 16384 65536

`random:NAME` has a published model's shape and random weights. Where the original's default
--topk 1 makes --topp and --temperature do nothing, here giving one of them draws from all tokens.

One call of `generate` is timed with one new token and with --genlen: the difference, per token, is
the decode time. After a warm-up (which compiles) the median of --repeats is taken.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import timing
from mamba_jax import MambaConfig, MambaLMHeadModel, generate
from mamba_jax.generation import decoding, load_tokenizer

_MAMBA1 = {"layer": "Mamba1"}
_MAMBA2 = {"layer": "Mamba2"}
_MAMBA3 = {"layer": "Mamba3"}
RANDOM = {
    "mamba-130m": {"d_model": 768, "n_layer": 24, "ssm_cfg": _MAMBA1},
    "mamba-2.8b": {"d_model": 2560, "n_layer": 64, "ssm_cfg": _MAMBA1},
    "mamba2-130m": {"d_model": 768, "n_layer": 24, "ssm_cfg": _MAMBA2},
    "mamba2-1.3b": {"d_model": 2048, "n_layer": 48, "ssm_cfg": _MAMBA2},
    "mamba2-2.7b": {"d_model": 2560, "n_layer": 64, "ssm_cfg": _MAMBA2},
    "mamba3-187m": {"d_model": 768, "n_layer": 12, "d_intermediate": 1536, "ssm_cfg": _MAMBA3},
    "tiny": {"d_model": 64, "n_layer": 2, "vocab_size": 257, "ssm_cfg": _MAMBA2},
}
_DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: list[str]) -> dict:
    """Measures what the options say; prints one JSON object and returns it."""
    options = _parser().parse_args(arguments)
    model = load(options)
    weights = jax.tree.leaves(nnx.state(model, nnx.Param))
    result = {
        **timing.circumstances(),
        "model": options.model,
        "parameters": sum(weight.size for weight in weights),
        "weight_bytes": sum(weight.nbytes for weight in weights),
        "dtype": options.dtype,
        "state_dtype": options.state_dtype,
    }
    if options.prefill:
        result["prefill"] = [prefill(model, length, options) for length in options.prefill]
    elif options.contexts:
        result["contexts"] = [memory(model, length, options) for length in sorted(options.contexts)]
        if options.plot:
            plot(result, options.plot)
    else:
        result |= decode(model, options)
    text = json.dumps(result, indent=2)
    sys.stdout.write(text + "\n")
    if options.out:
        pathlib.Path(options.out).write_text(text + "\n", encoding="utf-8")
    return result


def load(options: argparse.Namespace) -> MambaLMHeadModel:
    """The model: a checkpoint, or a published shape with random weights."""
    dtype = jnp.dtype(options.dtype)
    kind, _, name = options.model.partition(":")
    if kind != "random":
        return MambaLMHeadModel.from_pretrained(
            options.model, dtype=dtype, unroll=options.unroll or True
        )
    config = MambaConfig(**{"pad_vocab_size_multiple": 16} | RANDOM[name])
    unroll = options.unroll or True

    @nnx.jit
    def make():
        return MambaLMHeadModel(
            config, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=dtype, unroll=unroll
        )

    return make()


def decode(model: MambaLMHeadModel, options: argparse.Namespace) -> dict:
    """Times generation from a prompt."""
    tokenizer = load_tokenizer(options.tokenizer) if options.prompt else None
    prompt = tokenizer.encode(options.prompt) if tokenizer else _random_ids(options.promptlen)
    ids = np.repeat(np.asarray([prompt], np.int32), options.batch, axis=0)
    filters = options.topp < 1 or options.minp > 0 or options.temperature != 1
    top_k = options.topk if options.topk is not None else 0 if filters else 1
    settings = {
        "temperature": options.temperature,
        "top_k": top_k,
        "top_p": options.topp,
        "min_p": options.minp,
        "repetition_penalty": options.repetition_penalty,
        "key": jax.random.key(0),
        "state_dtype": jnp.dtype(options.state_dtype),
        "return_scores": options.scores,
    }

    def run(new_tokens: int):
        return generate(model, ids, max_new_tokens=new_tokens, **settings)

    first = _median(lambda: run(1), options.repeats)
    whole = _median(lambda: run(options.genlen), options.repeats)
    per_token = (whole - first) / max(options.genlen - 1, 1)
    result = {
        "batch": options.batch,
        "promptlen": ids.shape[1],
        "genlen": options.genlen,
        "sampling": {name: settings[name] for name in list(settings)[:5]},
        "prompt_and_first_token_ms": first * 1e3,
        "whole_ms": whole * 1e3,
        "decode_ms_per_token": per_token * 1e3,
        "tokens_per_second": options.batch / per_token,
        "peak_bytes": _peak_bytes(),
    }
    if tokenizer:
        result["text"] = tokenizer.decode(run(options.genlen).row(0))
    return result


def prefill(model: MambaLMHeadModel, length: int, options: argparse.Namespace) -> dict:
    """Times reading a prompt of some length."""
    ids = np.repeat(np.asarray([_random_ids(length)], np.int32), options.batch, axis=0)

    def run():
        dtype = jnp.dtype(options.state_dtype)
        chunk = options.prefill_chunk
        return generate(model, ids, max_new_tokens=1, prefill_chunk=chunk, state_dtype=dtype)

    seconds = _median(run, options.repeats)
    return {
        "length": length,
        "batch": options.batch,
        "prefill_chunk": options.prefill_chunk,
        "ms": seconds * 1e3,
        "tokens_per_second": options.batch * length / seconds,
    }


def memory(model: MambaLMHeadModel, length: int, options: argparse.Namespace) -> dict:
    """Bytes needed to read `length` tokens and to go on from there."""
    ids = np.asarray([_random_ids(length)], np.int32)
    chunk = min(options.prefill_chunk, length)
    result = generate(model, ids, max_new_tokens=8, prefill_chunk=chunk, return_cache=True)
    graph, params = nnx.split(model)
    piece = jax.ShapeDtypeStruct((1, chunk), jnp.int32)
    compiled = decoding.prefill.lower(graph, params, piece, None, result.cache).compile()
    analysis = compiled.memory_analysis()
    return {
        "length": length,
        "cache_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(result.cache)),
        "prefill_temporary_bytes": getattr(analysis, "temp_size_in_bytes", None),
        "peak_bytes": _peak_bytes(),
    }


def plot(result: dict, path: str) -> None:
    """Draws memory over context."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["contexts"]
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name in ("cache_bytes", "prefill_temporary_bytes"):
        values = [(row[name] or 0) / 2**20 for row in rows]
        axes.plot([row["length"] for row in rows], values, marker="o", label=name[:-6])
    axes.set(xscale="log", ylim=(0, None), xlabel="tokens of context", ylabel="MiB")
    axes.set_title(f"{result['model']}, chunked prefill and decode")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _median(run: Callable, repeats: int) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()  # the tokens come back to the host: nothing is left running
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _random_ids(length: int) -> list[int]:
    return np.random.default_rng(0).integers(1, 200, length).tolist()


def _peak_bytes() -> int | None:
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation")
    add = parser.add_argument
    names = ", ".join(RANDOM)
    text = f"a directory, a hub id, or random:NAME of {names}"
    add("--model", "--model-name", default="random:mamba2-130m", help=text)
    add("--prompt", help="a text (with --tokenizer); random ids without it")
    add("--tokenizer", default="bytes", help="'bytes' or a tokenizer.json")
    add("--promptlen", type=int, default=100)
    add("--genlen", type=int, default=100)
    add("--temperature", type=float, default=1.0)
    add("--topk", type=int, help="1 is greedy (the default unless another filter is given)")
    add("--topp", type=float, default=1.0)
    add("--minp", type=float, default=0.0)
    add("--repetition-penalty", type=float, default=1.0)
    add("--batch", type=int, default=1)
    add("--scores", action="store_true", help="return the logits too, as the original does")
    add("--dtype", choices=_DTYPES, default="bfloat16")
    add("--state-dtype", choices=_DTYPES, default="float32")
    add("--unroll", type=int, default=1, help="layers per iteration; 0 for all")
    add("--repeats", type=int, default=3)
    add("--prefill", type=int, nargs="+", metavar="LENGTH", help="time prompts instead")
    add("--prefill-chunk", type=int, default=4096)
    add("--contexts", type=int, nargs="+", metavar="LENGTH", help="measure memory instead")
    add("--plot", help="PNG of memory over context")
    add("--out", help="also write the JSON here")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
