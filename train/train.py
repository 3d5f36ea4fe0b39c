# SPDX-License-Identifier: Apache-2.0
"""A training run from top to bottom: config → mesh → data → state → restore → loop → evaluate →
sample → save.

Each part is in the file of its name; the mathematics of one step is in `step.py`. The run's
directory holds config.json, metrics.jsonl, checkpoints/, loss.png and sample.txt.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import grain
import jax
from rich.console import Console

from mamba_jax.checkpoint.store import CheckpointStore
from train import data, directory, flops, metrics, step
from train.command_line import parse
from train.config import MAY_CHANGE_ON_RESUME, TrainConfig
from train.errors import TrainingFailed
from train.evaluate import evaluate
from train.files import write_whole
from train.interruption import Interruption
from train.launch.processes import join_processes
from train.placement import batch_sharding, make_mesh, on
from train.sample import write_sample


def main(arguments: Sequence[str]) -> None:
    """Parses the command line and trains."""
    config = parse(arguments)
    join_processes()
    train(config, Console(highlight=False, soft_wrap=True))


def train(config: TrainConfig, console: Console) -> Path:
    """Trains a model.

    Args:
      config: Everything about the run.
      console: Where progress is shown.

    Returns:
      The run's directory.

    Raises:
      UserError: the config asks for what is not there, or the directory holds another run.
      CheckpointError: the run cannot be resumed from what is on disk.
      TrainingFailed: too many steps in a row had a non-finite loss or gradient.
    """
    # ── Config ────────────────────────────────────────────────────────────────────────────────────
    folder = directory.check(config)
    show = console.out if jax.process_index() == 0 else lambda text: None
    directory.describe(config, show)

    # ── Mesh ──────────────────────────────────────────────────────────────────────────────────────
    mesh = make_mesh(config.mesh)
    sharding = batch_sharding(mesh, config)
    device = jax.devices()[0].device_kind
    show(f"devices: {jax.device_count()} × {device}, {jax.process_count()} process(es)")

    # ── Data ──────────────────────────────────────────────────────────────────────────────────────
    loaded = data.load(config)
    batches = data.training_batches(loaded.train, config)
    show(
        f"data: {loaded.train.num_tokens:,} tokens to train on, "
        f"{loaded.validation.num_tokens:,} to validate"
    )

    with on(mesh), Interruption() as interruption:
        # ── State ─────────────────────────────────────────────────────────────────────────────────
        state = step.init_state(config, mesh)
        if config.init_from:
            state = step.with_pretrained(state, config, mesh)
        cost = flops.flops_per_token(config.model, state["params"], config.data.seq_len)
        show(f"model: {_size(state['params']):,} parameters, {cost / 1e6:.1f} MFLOP per token")

        # ── Restore ───────────────────────────────────────────────────────────────────────────────
        store = directory.open_store(config, show)
        first = 0
        if config.resume:
            state, first = _restore(store, state, batches, config, show)

        # ── Loop ──────────────────────────────────────────────────────────────────────────────────
        run = _Run(config, loaded, batches, store, sharding)
        with metrics.Reporter(folder / directory.METRICS, config, first, cost, console) as reporter:
            state, last = _loop(run, state, first, reporter, interruption)

            # ── Evaluate ──────────────────────────────────────────────────────────────────────────
            finished = last >= config.steps
            if finished:
                reporter.evaluation(last, run.evaluate(state))

    # ── Sample ────────────────────────────────────────────────────────────────────────────────────
    if finished:
        _sample(config, state, loaded.tokenizer, folder / directory.SAMPLE, show)

    # ── Save ──────────────────────────────────────────────────────────────────────────────────────
    store.close()
    directory.finish(config, "" if finished else interruption.asked, last, show)
    return folder


class _Run:
    """What the loop needs beside the state: the compiled functions, the data and the store."""

    def __init__(
        self,
        config: TrainConfig,
        loaded: data.Data,
        batches: grain.DatasetIterator,
        store: CheckpointStore,
        sharding: jax.sharding.Sharding | None,
    ):
        self.config = config
        self.batches = batches
        self.store = store
        self.train_step = step.make_train_step(config)
        self._evaluate_step = step.make_evaluate_step(config)
        self._rows = loaded.validation
        self._token_bytes = loaded.tokenizer.token_bytes if loaded.tokenizer else None
        self._sharding = sharding

    def next_batch(self) -> dict[str, jax.Array]:
        return data.to_device(next(self.batches), self._sharding)

    def evaluate(self, state: step.State) -> dict:
        return evaluate(
            state["params"],
            self._rows,
            self.config,
            self._evaluate_step,
            token_bytes=self._token_bytes,
            sharding=self._sharding,
        )

    def save(self, number: int, state: step.State) -> None:
        place = self.batches.get_state()
        self.store.save(number, state, data=place, config=self.config.to_dict())


def _loop(
    run: _Run,
    state: step.State,
    first: int,
    reporter: metrics.Reporter,
    interruption: Interruption,
) -> tuple[step.State, int]:
    """Takes the steps after `first`; returns the state and the number of the last step taken."""
    config = run.config
    if first == 0:
        reporter.evaluation(0, run.evaluate(state))
    waiting = None
    number = first
    while number < config.steps:
        state, found = run.train_step(state, run.next_batch())
        number += 1
        # Numbers are read one step late, while the device is busy with the next one.
        _record(waiting, config, reporter)
        waiting = number, found
        stop = interruption.reached(number, run.store)
        last = stop or number == config.steps
        evaluates, saves = (
            _due(number, config.evaluation.every),
            _due(number, config.checkpoint.every),
        )
        if last or evaluates or saves:
            _record(waiting, config, reporter)
            waiting = None
        if last or saves:
            run.save(number, state)
        if evaluates and not last:
            reporter.evaluation(number, run.evaluate(state))
        if stop:
            break
    return state, number


def _due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def _record(
    waiting: tuple[int, dict] | None, config: TrainConfig, reporter: metrics.Reporter
) -> None:
    """Shows a step's metrics and ends a run that no longer learns."""
    if waiting is None:
        return
    number, found = waiting[0], {name: v.item() for name, v in jax.device_get(waiting[1]).items()}
    reporter.step(number, found)
    if found["bad_in_a_row"] >= config.max_bad_steps:
        raise TrainingFailed(
            f"step {number}: loss or gradient was not finite in {found['bad_in_a_row']} steps in a "
            f"row (loss {found['loss']}, gradient norm {found['grad_norm']}); those steps were "
            "skipped and the last checkpoint is good: lower optimizer.learning-rate or look at the "
            "data"
        )


def _restore(
    store: CheckpointStore,
    state: step.State,
    batches: grain.DatasetIterator,
    config: TrainConfig,
    show: Callable[[str], None],
) -> tuple[step.State, int]:
    restored = store.restore(state, config=config.to_dict(), may_change=MAY_CHANGE_ON_RESUME)
    if restored is None:
        show("no checkpoint to resume from; starting at step 0")
        return state, 0
    batches.set_state(restored.data)
    show(f"resumed at step {restored.step}")
    return restored.state, restored.step


def _sample(
    config: TrainConfig,
    state: step.State,
    tokenizer: data.Tokenizer | None,
    file: Path,
    show: Callable[[str], None],
) -> None:
    if tokenizer is None or not config.sample.tokens:
        return
    text = write_sample(config, state["params"], tokenizer)
    if jax.process_index() == 0:
        write_whole(file, text)
    show(f"sample (prompt {config.sample.prompt!r}):")
    for line in text.splitlines():
        show(f"  | {line}")


def _size(params: dict) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))
