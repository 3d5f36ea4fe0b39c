# SPDX-License-Identifier: Apache-2.0
"""Twenty AdamW steps of the original's model in torch, step by step: loss, gradient, weights."""

import jax
import numpy as np
import pytest

from mamba_jax.checkpoint.packing import file_tensors
from mamba_jax.config import MambaConfig
from tests import golden
from tests.tolerances import assert_close
from train import step
from train.config import DataConfig, OptimizerConfig, TrainConfig, UserError

# The golden README's own: what a plain fp32 run may lose against fp64 in twenty steps.
LOSS, FIRST_LOSSES, GRAD_NORM, WEIGHTS = 1e-4, 1e-5, 1e-3, 1e-3
FOLDER = golden.DATA / "lm_mamba2"


def config(options):
    return TrainConfig(
        model=MambaConfig.from_json(FOLDER / "config.json"),
        init_from=str(FOLDER),
        data=DataConfig(seq_len=options["seqlen"] - 1, batch_size=options["batch"]),
        optimizer=OptimizerConfig(
            learning_rate=options["lr"],
            schedule="constant",
            warmup_steps=options["warmup_steps"],
            b1=options["betas"][0],
            b2=options["betas"][1],
            eps=options["eps"],
            weight_decay=options["weight_decay"],
            clip_norm=options["clip"],
        ),
        steps=options["steps"],
    )


def assert_weights(case, which, run, params):
    """Compares the stored parameters of a moment, `which`, in the file's layout."""

    def parameter(path, layer):
        leaf = params
        for key in path:
            leaf = leaf[key]
        return np.asarray(leaf if layer is None else leaf[layer])

    tensors = {t.name: t for t in file_tensors(step.model_with(run, params))}
    stored = {name: a for name, a in case.outputs.items() if name.startswith(f"{which}.")}
    assert stored
    for name, wanted in stored.items():
        got = tensors[name.removeprefix(f"{which}.")].assemble(parameter)
        assert_close(name, got, wanted, WEIGHTS)


def test_twenty_steps_equal_torchs():
    case = golden.load("train_mamba2_adamw_20steps")
    with np.load(golden.DATA / "train_mamba2_adamw_20steps.npz") as file:
        tokens = file["tokens"].astype(np.int32)
    run = config(case.options)
    state = step.with_pretrained(step.init_state(run), run)
    train_step = step.make_train_step(run)
    for number, row in enumerate(tokens):
        inputs, targets = row[:, :-1], row[:, 1:]
        batch = {
            "tokens": inputs,
            "targets": targets,
            "seq_idx": np.zeros_like(inputs),
            "loss_mask": np.ones(inputs.shape, bool),
        }
        state, found = train_step(state, batch)
        tolerance = FIRST_LOSSES if number < 5 else LOSS
        wanted = case.outputs["loss_f64"][number]
        assert_close(f"loss of step {number}", found["loss"], wanted, tolerance)
        wanted = case.outputs["grad_norm_before_clip_f64"][number]
        assert_close(f"gradient norm of step {number}", found["grad_norm"], wanted, GRAD_NORM)
        if number == 0:
            assert_weights(case, "after_step1", run, jax.device_get(state["params"]))
    assert_weights(case, "final", run, state["params"])


def test_initial_weights_of_another_model_or_from_nowhere_are_refused():
    run = config(golden.load("train_mamba2_adamw_20steps").options)
    other = MambaConfig.from_dict({**run.model.to_dict(), "norm_eps": 1e-6})
    for change, message in (
        ({"model": other}, r"init_from: wanted the model of .*, got norm_eps \(1e-05, now 1e-06\)"),
        ({"init_from": str(FOLDER / "absent")}, "init_from: "),
    ):
        values = {field: getattr(run, field) for field in run.__dataclass_fields__} | change
        with pytest.raises(UserError, match=message):
            step.with_pretrained({}, TrainConfig(**values))
