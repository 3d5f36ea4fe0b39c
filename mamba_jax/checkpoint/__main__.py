# SPDX-License-Identifier: Apache-2.0
"""`python -m mamba_jax.checkpoint SOURCE DESTINATION`: converts a published checkpoint.

python -m mamba_jax.checkpoint state-spaces/mamba2-130m converted/ --format hf
python -m mamba_jax.checkpoint downloaded/ converted/ --dtype bfloat16
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import jax.numpy as jnp

from mamba_jax.checkpoint.files import COMPANIONS
from mamba_jax.checkpoint.pretrained import (
    FORMATS,
    PretrainedError,
    from_pretrained,
    local_files,
    save_pretrained,
    stored_dtype,
)

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def main(arguments: Sequence[str]) -> None:
    """Reads a checkpoint in either layout and writes it in the one asked for.

    Raises:
      ValueError: a mistake on the command line or in a file; the message is for the user.
    """
    options = _parser().parse_args(list(arguments))
    destination = Path(options.destination)
    files = local_files(options.source, revision=options.revision)
    if destination.exists() and files.directory.resolve() == destination.resolve():
        raise PretrainedError("the destination must be another directory than the source")
    dtype = _DTYPES.get(options.dtype) or stored_dtype(files.directory)
    model = from_pretrained(files.directory, param_dtype=dtype)
    save_pretrained(model, destination, format=options.format)
    for name in COMPANIONS:
        if (files.directory / name).is_file():
            shutil.copyfile(files.directory / name, destination / name)
    size = (destination / "model.safetensors").stat().st_size
    sys.stdout.write(
        f"{destination}: {options.format}, {jnp.dtype(dtype).name}, {size / 1e6:.1f} MB\n"
    )


def _parser() -> argparse.ArgumentParser:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(f"command line: {message}")

    parser = Parser(prog="python -m mamba_jax.checkpoint", description="Converts a checkpoint.")
    parser.add_argument("source", help="a directory, or a hub id such as org/name")
    parser.add_argument("destination", help="a directory, made when missing")
    parser.add_argument("--format", choices=FORMATS, default="state-spaces")
    text = "of the weights; 'stored' keeps what the source has"
    parser.add_argument("--dtype", choices=["stored", *_DTYPES], default="stored", help=text)
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    return parser


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
