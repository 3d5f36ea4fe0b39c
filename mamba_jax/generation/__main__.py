# SPDX-License-Identifier: Apache-2.0
"""`python -m mamba_jax.generation CHECKPOINT --prompt TEXT`: continues a text.

python -m mamba_jax.generation state-spaces/mamba2-130m --tokenizer tokenizer.json --prompt "Once"
python -m mamba_jax.generation exported/ --tokenizer bytes --prompt "def " --temperature 0.8
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import NoReturn

import jax
import jax.numpy as jnp

from mamba_jax.checkpoint.pretrained import from_pretrained, local_files
from mamba_jax.generation.text import generate_text, load_tokenizer

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def main(arguments: Sequence[str]) -> None:
    """Loads a checkpoint and writes what it makes of the prompts.

    Raises:
      ValueError: a mistake on the command line or in a file; the message is for the user.
    """
    options = _parser().parse_args(list(arguments))
    tokenizer_name = options.tokenizer
    if tokenizer_name is None:
        tokenizer_name = local_files(options.checkpoint).directory
        if not (tokenizer_name / "tokenizer.json").is_file():
            raise ValueError(
                f"{options.checkpoint} has no tokenizer.json; give --tokenizer FILE or bytes"
            )
    tokenizer = load_tokenizer(tokenizer_name)
    model = from_pretrained(options.checkpoint, dtype=_DTYPES[options.dtype])
    prompts = options.prompt or [""]
    streams = len(prompts) * options.num_samples == 1 and not options.json

    def write(row: int, piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    if streams:
        sys.stdout.write(prompts[0])
    texts = generate_text(
        model,
        tokenizer,
        prompts,
        stop=options.stop,
        stream=write if streams else None,
        num_samples=options.num_samples,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        prefill_chunk=options.prefill_chunk,
        key=jax.random.key(options.seed),
    )
    for index, text in enumerate(texts):
        prompt = prompts[index // options.num_samples]
        if options.json:
            sys.stdout.write(json.dumps({"prompt": prompt, "text": text}) + "\n")
        else:
            sys.stdout.write("\n" if streams else f"{prompt}{text}\n")


def _parser() -> argparse.ArgumentParser:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(f"command line: {message}")

    parser = Parser(prog="python -m mamba_jax.generation", description="Continues texts.")
    parser.add_argument("checkpoint", help="a directory, or a hub id such as org/name")
    add = parser.add_argument
    add("--prompt", action="append", help="text to continue; may be given several times")
    add("--tokenizer", help="'bytes' or a tokenizer.json; the checkpoint's own by default")
    add("--max-new-tokens", type=int, default=128)
    add("--temperature", type=float, help="0 for the most likely token each time (default)")
    add("--top-k", type=int, default=0)
    add("--top-p", type=float, default=1.0)
    add("--min-p", type=float, default=0.0)
    add("--repetition-penalty", type=float, default=1.0)
    add("--num-samples", type=int, default=1, help="continuations per prompt")
    add("--stop", action="append", default=[], help="end before this string")
    add("--prefill-chunk", type=int, default=4096, help="prompt tokens read at a time")
    add("--seed", type=int, default=0)
    add("--dtype", choices=_DTYPES, default="float32")
    add("--json", action="store_true", help="one line of JSON per continuation")
    return parser


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.stderr.write(" ".join(f"error: {error}".split()) + "\n")
        sys.exit(2)
