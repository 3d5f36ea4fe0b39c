# SPDX-License-Identifier: Apache-2.0
"""Validation loss, perplexity and bits per byte; also for a finished run and any text.

python -m train.evaluate runs/demo-mamba2
python -m train.evaluate runs/demo-mamba2 --text book.txt --batches 0
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from mamba_jax.checkpoint.store import CheckpointStore
from train import data, metrics, step
from train.config import TrainConfig, UserError
from train.placement import batch_sharding, make_mesh, on


def evaluate(
    params: dict,
    rows: data.PackedRows,
    config: TrainConfig,
    evaluate_step: Callable,
    *,
    token_bytes: np.ndarray | None,
    sharding: jax.sharding.Sharding | None = None,
) -> dict[str, float | int | None]:
    """Measures the loss of the rows' targets.

    Args:
      params: The model's parameters.
      rows: The rows; the first `config.evaluation.batches` batches of them.
      config: The run.
      evaluate_step: From `step.make_evaluate_step`.
      token_bytes: (ids,), int. Bytes of text per token id; None when unknown.
      sharding: Of the batches.

    Returns:
      loss (nats per token), perplexity, bits_per_byte (None when bytes are unknown), tokens.
    """
    table = np.zeros(config.model.padded_vocab_size, np.int32)
    if token_bytes is not None:
        table[: len(token_bytes)] = token_bytes
    table = jnp.asarray(table)
    nats, tokens, size = 0.0, 0, 0
    limit = config.evaluation.batches
    for batch in data.validation_batches(rows, config.data.batch_size, limit):
        sums = jax.device_get(evaluate_step(params, data.to_device(batch, sharding), table))
        nats += float(sums["nats"])
        tokens += int(sums["tokens"])
        size += int(sums["bytes"])
    loss = nats / max(tokens, 1)
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": nats / math.log(2) / size if size else None,
        "tokens": tokens,
    }


def main(arguments: Sequence[str]) -> None:
    """Evaluates a run's newest checkpoint; shows words and a line of JSON.

    Raises:
      UserError: the run or the text cannot be read.
    """
    options = _parse(arguments)
    checkpoints = Path(options.run) / "checkpoints"
    if not checkpoints.is_dir():
        raise UserError(f"run: wanted the directory of a run, got {options.run} (no checkpoints)")
    console = Console(highlight=False, soft_wrap=True)
    store = CheckpointStore(checkpoints, read_only=True, report=console.out)
    saved = store.newest_config()
    if saved is None:
        raise UserError(f"run: wanted a readable checkpoint, got none in {checkpoints}")
    config = _with_options(TrainConfig.from_dict(saved), options)
    mesh = make_mesh(config.mesh)
    restored = store.restore(step.abstract_state(config, mesh))
    loaded = data.load(config)
    with on(mesh):
        found = evaluate(
            restored.state["params"],
            loaded.validation,
            config,
            step.make_evaluate_step(config),
            token_bytes=loaded.tokenizer.token_bytes if loaded.tokenizer else None,
            sharding=batch_sharding(mesh, config),
        )
    console.out(f"{options.run} at step {restored.step}: {metrics.describe(found)}")
    console.out(json.dumps({"step": restored.step, **found}))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UserError(f"command line: {message}")

    parser = Parser(prog="python -m train.evaluate", description="Evaluates a run.")
    parser.add_argument("run", help="the run's directory")
    text = "files or directories, instead of the run's validation data"
    parser.add_argument("--text", nargs="+", default=[], help=text)
    parser.add_argument("--batches", type=int, help="batches at most; 0 for all")
    return parser.parse_args(list(arguments))


def _with_options(config: TrainConfig, options: argparse.Namespace) -> TrainConfig:
    if options.text:
        # Both: nothing is trained on, and the run's own text may be gone.
        source = dataclasses.replace(
            config.data, train=tuple(options.text), validation=tuple(options.text)
        )
        config = dataclasses.replace(config, data=source)
    if options.batches is not None:
        evaluation = dataclasses.replace(config.evaluation, batches=options.batches)
        config = dataclasses.replace(config, evaluation=evaluation)
    return config


if __name__ == "__main__":
    import sys

    from train.errors import exit_with

    exit_with(main, sys.argv[1:])
