# SPDX-License-Identifier: Apache-2.0
"""Progress: lines without a terminal, a bar on one, JSON lines always; FLOPs by hand."""

import io
import json

import jax
import pytest
from rich.console import Console

from mamba_jax.config import MambaConfig
from tests.train import tiny
from train import flops, metrics, step
from train.config import TrainConfig

FOUND = {
    "loss": 2.5,
    "tokens": 128,
    "grad_norm": 1.0,
    "learning_rate": 1e-3,
    "skipped": 0,
    "bad_in_a_row": 0,
}


def report(path, config, first=0, terminal=False):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    with metrics.Reporter(path, config, first, 1e6, console) as reporter:
        for number in range(first + 1, config.steps + 1):
            reporter.step(number, FOUND)
        reporter.evaluation(config.steps, {"loss": 2.0, "perplexity": 7.4, "bits_per_byte": None})
    return console.file.getvalue()


def test_lines_come_every_log_every_steps_and_json_always(tmp_path):
    shown = report(tmp_path / "m.jsonl", tiny.config(tmp_path, "unused"))
    assert [line.split("  ")[0] for line in shown.splitlines()[:2]] == ["step 4/8", "step 8/8"]
    assert "tokens/s" in shown and "ETA" in shown
    assert "validation loss 2.0000, perplexity 7.4" in shown and "bits" not in shown
    lines = metrics.read(tmp_path / "m.jsonl")
    assert [line["step"] for line in lines] == [*range(1, 9), 8]
    assert "tokens_per_s" in lines[3] and "tokens_per_s" not in lines[4]
    # The CPU's peak is unknown, so no utilisation is claimed.
    assert "mfu" not in lines[3]


def test_a_terminal_gets_a_bar(tmp_path):
    shown = report(tmp_path / "m.jsonl", tiny.config(tmp_path, "unused"), terminal=True)
    assert "8/8" in shown and "━" in shown


def test_lines_of_steps_taken_again_are_dropped_and_a_torn_one_too(tmp_path):
    path = tmp_path / "m.jsonl"
    report(path, tiny.config(tmp_path, "unused"))
    path.write_text(path.read_text() + '{"step": 9, "lo')
    report(path, tiny.config(tmp_path, "unused"), first=5)
    assert [line["step"] for line in metrics.read(path)] == [*range(1, 9), 8]
    for line in path.read_text().splitlines():
        json.loads(line)


def test_flops_of_a_small_mamba2_by_hand(tmp_path):
    config = tiny.config(tmp_path, "unused")
    params = step.abstract_state(config)["params"]
    # d 16, inner 32, 4 heads, state 8: in_proj z, x, B, C, dt, and out_proj; head 264 · 16.
    per_layer = 16 * (32 + 32 + 8 + 8 + 4) + 32 * 16
    scan = 5 * 32 * 8
    wanted = 3 * (2 * (2 * per_layer + 264 * 16) + 2 * scan)
    assert flops.flops_per_token(config.model, params, 32) == wanted


def test_flops_of_a_large_model_are_six_per_weight_and_token():
    model = MambaConfig(d_model=768, n_layer=24, vocab_size=50277, ssm_cfg={"layer": "Mamba2"})
    state = step.abstract_state(TrainConfig(model=model))
    weights = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    assert flops.flops_per_token(model, state["params"], 2048) == pytest.approx(
        6 * weights, rel=0.1
    )
