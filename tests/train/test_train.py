# SPDX-License-Identifier: Apache-2.0
"""Whole runs: they end with everything written, resume bit for bit, and fail in one line."""

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from rich.console import Console

from mamba_jax.checkpoint.store import CheckpointError
from tests.train import tiny
from train import data, metrics, step
from train.config import (
    EvaluationConfig,
    MeshConfig,
    SampleConfig,
    UserError,
)
from train.errors import TrainingFailed, exit_with
from train.evaluate import main as evaluate_main
from train.train import train

PLACES = ("output", "mesh")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return tiny.write_text(tmp_path_factory.mktemp("data"))


def run(config):
    """Trains; returns the run's directory and what was shown."""
    console = Console(file=io.StringIO(), width=200)
    return train(config, console), console.file.getvalue()


def losses(folder):
    return {
        line["step"]: line["loss"]
        for line in metrics.read(folder / "metrics.jsonl")
        if "loss" in line
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    """A run that was never stopped: its directory, what it showed, its config."""
    config = tiny.config(
        tmp_path_factory.mktemp("whole"),
        text,
        evaluation=EvaluationConfig(every=4, batches=2),
        sample=SampleConfig(tokens=12, prompt="doc"),
    )
    return *run(config), config


def test_a_run_writes_everything_and_says_where(whole):
    folder, shown, config = whole
    lines = metrics.read(folder / "metrics.jsonl")
    assert sorted(losses(folder)) == list(range(1, 9))
    assert [line["step"] for line in lines if "validation_loss" in line] == [0, 4, 8]
    assert lines[0]["validation_bits_per_byte"] == pytest.approx(8, abs=0.2)
    assert losses(folder)[8] < losses(folder)[1]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "sample.txt").read_text().startswith("doc")
    saved = json.loads((folder / "config.json").read_text())
    assert saved["config"] == config.to_dict() and saved["hash"] == config.hash
    assert sorted(p.name for p in (folder / "checkpoints").iterdir() if p.name.isdigit()) == [
        "6",
        "8",
    ]
    for said in (config.hash, "checkpoints: ", "loss curve: ", "sample: ", "step 8/8"):
        assert said in shown
    # Nothing half-written is left behind.
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def stopped_at(monkeypatch, config, number):
    """Runs until the process gets SIGTERM while step `number` is recorded."""
    record = metrics.Reporter.step

    def step_and_signal(self, step, found):
        record(self, step, found)
        if step == number:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(metrics.Reporter, "step", step_and_signal)
        return run(config)


def test_sigterm_saves_and_resuming_is_as_if_nothing_had_happened(
    whole, text, tmp_path, monkeypatch
):
    folder, _, config = whole
    config = dataclasses.replace(config, output=str(tmp_path / "run"))
    place, shown = stopped_at(monkeypatch, config, 3)
    assert "stopped by SIGTERM after step" in shown
    assert (place / "STOPPED").exists()
    assert not (place / "sample.txt").exists()
    assert max(losses(place)) < 8
    place, shown = run(dataclasses.replace(config, resume=True))
    assert "resumed at step" in shown
    assert not (place / "STOPPED").exists()
    # Exactly: same data in the same order, same weights, same losses, same text.
    assert losses(place) == losses(folder)
    assert (place / "sample.txt").read_text() == (folder / "sample.txt").read_text()
    assert metrics.read(place / "metrics.jsonl")[-1] == metrics.read(folder / "metrics.jsonl")[-1]


def test_a_damaged_checkpoint_is_passed_over_and_a_run_can_be_prolonged(whole, tmp_path):
    folder, _, config = whole
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    for file in (copy / "checkpoints" / "8").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    more = dataclasses.replace(config, output=str(copy), resume=True, steps=9)
    place, shown = run(dataclasses.replace(more, sample=SampleConfig(tokens=0)))
    assert "checkpoint 8 is damaged" in shown and "resumed at step 6" in shown
    found = losses(place)
    assert found.pop(9) and found == losses(folder)


def test_resuming_with_another_config_is_refused_by_field(whole):
    _, _, config = whole
    other = dataclasses.replace(
        config, resume=True, data=dataclasses.replace(config.data, seq_len=16), seed=4
    )
    with pytest.raises(CheckpointError) as error:
        run(other)
    assert "data.seq_len (32, now 16), seed (0, now 4)" in str(error.value)


def test_a_directory_with_a_run_is_not_touched_without_being_asked(whole):
    folder, _, config = whole
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="wanted a new directory, or --resume or --overwrite"):
        run(config)
    # Not even with overwrite, when the run cannot start.
    wrong = dataclasses.replace(config.data, train=("absent",))
    with pytest.raises(UserError, match="does not exist"):
        run(dataclasses.replace(config, data=wrong, overwrite=True))
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_too_many_steps_that_are_not_finite_end_the_run(text, tmp_path, monkeypatch):
    config = tiny.config(
        tmp_path,
        text,
        max_bad_steps=2,
    )
    place = data.to_device

    def broken(batch, sharding):
        return place({**batch, "tokens": batch["tokens"] + 1000}, sharding)

    monkeypatch.setattr(data, "to_device", broken)
    with pytest.raises(TrainingFailed, match="not finite in 2 steps in a row"):
        run(config)


@pytest.mark.multidevice
def test_losses_do_not_depend_on_the_mesh(whole, tmp_path):
    folder, _, config = whole
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    config = dataclasses.replace(
        config, output=str(tmp_path / "run"), mesh=mesh, sample=SampleConfig(tokens=0)
    )
    place, _ = run(config)
    wanted, got = losses(folder), losses(place)
    np.testing.assert_allclose([got[s] for s in wanted], list(wanted.values()), rtol=1e-4)


def test_a_mesh_that_does_not_fit_is_refused(text, tmp_path):
    for mesh, message in (
        (MeshConfig(data=3, fsdp=5), "mesh: the axes must multiply to the number of devices, 8"),
        (MeshConfig(data=8), "data.batch_size: wanted a multiple of 8"),
        (MeshConfig(data=1, fsdp=1, tensor=8), "mesh: the tensor axis must divide"),
    ):
        with pytest.raises(UserError, match=message):
            run(tiny.config(tmp_path, text, mesh=mesh))
    assert not (tmp_path / "run").exists()


def test_evaluating_a_run_repeats_its_last_validation(whole, tmp_path, capsys):
    folder, _, _ = whole
    evaluate_main([str(folder)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    last = metrics.read(folder / "metrics.jsonl")[-1]
    assert found == {name.removeprefix("validation_"): value for name, value in last.items()}
    # Any text, all of it: each of its 26 bytes and its end is predicted once.
    (tmp_path / "new.txt").write_text("document 3 repeats itself.")
    evaluate_main([str(folder), "--text", str(tmp_path / "new.txt"), "--batches", "0"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["tokens"] == 27
    nats = found["loss"] * 27
    assert found["bits_per_byte"] == pytest.approx(nats / np.log(2) / 26)
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: run"),
        (["absent"], "wanted the directory of a run, got absent (no checkpoints)"),
    ],
)
def test_evaluating_nothing_is_one_line_and_exit_code_two(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        exit_with(evaluate_main, arguments)
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1


def test_a_mistake_on_the_command_line_shows_no_traceback(tmp_path):
    command = [sys.executable, "-m", "train", "demo", "--data.train", "absent.txt"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: data.train: wanted a file or directory, got absent.txt (does not exist)"
    )
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_state_leaves_lie_on_the_mesh_as_the_rules_say(text, tmp_path):
    from train.placement import make_mesh

    config = tiny.config(tmp_path, text, mesh=MeshConfig(data=1, fsdp=2, tensor=2))
    state = step.abstract_state(config, make_mesh(config.mesh))
    kernel = state["params"]["runs"][0]["mixer"]["in_proj"]["x"]["kernel"].sharding.spec
    moment = state["optimizer"][0].mu["runs"][0]["mixer"]["in_proj"]["x"]["kernel"].sharding.spec
    assert kernel == moment == jax.sharding.PartitionSpec(None, "fsdp", "tensor")
    assert state["step"].sharding.is_fully_replicated
