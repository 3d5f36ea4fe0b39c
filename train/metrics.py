# SPDX-License-Identifier: Apache-2.0
"""What a run shows and writes: a bar on a terminal, plain lines elsewhere, JSON lines always.

`metrics.jsonl` has a line per step with its loss, and a line per evaluation; `loss.png` is drawn
from it alone. Only process 0 shows and writes.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from train.config import TrainConfig
from train.files import write_whole
from train.flops import peak_flops_per_s


class Reporter:
    """Shows and writes the progress of a run; a context manager.

    Args:
      path: The metrics file.
      config: The run.
      first_step: Steps already taken; lines of later steps, from an earlier attempt, are dropped.
      flops_per_token: For MFU, shown where the devices' peak is known.
      console: Where to show.
    """

    def __init__(
        self,
        path: Path,
        config: TrainConfig,
        first_step: int,
        flops_per_token: float,
        console: Console,
    ):
        self._path = path
        self._steps = config.steps
        self._log_every = config.log_every
        self._first = first_step
        self._flops_per_token = flops_per_token
        self._peak = peak_flops_per_s()
        self._console = console
        self._started = self._last_time = None
        self._tokens = 0.0
        self._bar = _bar(console) if console.is_terminal else None
        self._active = jax.process_index() == 0

    def __enter__(self) -> "Reporter":
        if self._active:
            _drop_after(self._path, self._first)
            self._file = self._path.open("a", encoding="utf-8")
            if self._bar:
                self._bar.start()
                self._task = self._bar.add_task(
                    "", total=self._steps, completed=self._first, text=""
                )
        return self

    def __exit__(self, *exception: object) -> None:
        if self._active:
            if self._bar:
                self._bar.stop()
            self._file.close()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records step `step`, counted from 1, with the metrics of the train step as numbers."""
        now = time.perf_counter()
        self._tokens += metrics["tokens"]
        # The first step compiles; speed is measured from its end.
        if self._started is None:
            self._started = self._last_time = now
            self._tokens = 0.0
        seconds = now - self._last_time
        due = step % self._log_every == 0 or step == self._steps
        line = {"step": step, **metrics}
        text = f"loss {metrics['loss']:.4f}"
        if due and seconds > 0 and self._tokens:
            rate = self._tokens / seconds
            line["tokens_per_s"] = round(rate, 1)
            text += f"  {_thousands(rate)} tokens/s"
            if self._peak:
                line["mfu"] = round(rate * self._flops_per_token / self._peak, 4)
                text += f"  MFU {100 * line['mfu']:.1f} %"
            left = (self._steps - step) * (now - self._started) / max(1, step - self._first - 1)
            self._show_line(step, text, metrics, left)
            self._last_time, self._tokens = now, 0.0
        if self._active and self._bar:
            self._bar.update(self._task, completed=step, **({"text": text} if due else {}))
        self._write(line)

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records an evaluation after `step` steps."""
        self._write({"step": step, **{f"validation_{k}": v for k, v in metrics.items()}})
        self.line(f"step {step}: validation {describe(metrics)}")
        # An evaluation's time is not training time.
        if self._last_time is not None:
            self._last_time, self._tokens = time.perf_counter(), 0.0

    def line(self, text: str) -> None:
        """Shows a line (above the bar, where there is one)."""
        if self._active:
            console = self._bar.console if self._bar else self._console
            console.out(text, highlight=False)

    def _show_line(self, step: int, text: str, metrics: Mapping[str, Any], left: float) -> None:
        if self._bar:
            return
        skipped = f"  skipped {metrics['skipped']}" if metrics["skipped"] else ""
        self.line(
            f"step {step}/{self._steps}  {text}  grad {metrics['grad_norm']:.2f}  "
            f"lr {metrics['learning_rate']:.2e}{skipped}  ETA {_duration(left)}"
        )

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._active:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def describe(metrics: Mapping[str, Any]) -> str:
    """An evaluation in words: loss, perplexity and, where bytes are known, bits per byte."""
    words = f"loss {metrics['loss']:.4f}, perplexity {metrics['perplexity']:.4g}"
    if metrics.get("bits_per_byte") is not None:
        words += f", {metrics['bits_per_byte']:.3f} bits per byte"
    return words


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line cut short by a kill is left out."""
    lines = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
    return lines


def plot(metrics_file: Path, image: Path, title: str) -> None:
    """Draws the training and validation loss of a metrics file as a PNG."""
    # The object interface needs no display and leaves no global state behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read(metrics_file)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for name, label, style in (
        ("loss", "training", {"linewidth": 0.8}),
        ("validation_loss", "validation", {"marker": "o", "markersize": 4}),
    ):
        points = [(line["step"], line[name]) for line in lines if name in line]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    canvas = FigureCanvasAgg(figure)
    write_whole(image, lambda path: canvas.print_png(path))


def _bar(console: Console) -> Progress:
    return Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[text]}"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
    )


def _drop_after(path: Path, step: int) -> None:
    """Leaves out the lines of steps that a resumed run takes again."""
    lines = read(path)
    kept = [line for line in lines if line["step"] <= step]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))


def _thousands(rate: float) -> str:
    return f"{rate / 1000:.1f} k" if rate >= 10_000 else f"{rate:.0f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
