# SPDX-License-Identifier: Apache-2.0
"""Configs: what the command line can say, what it refuses and how; presets are complete."""

import dataclasses
import subprocess
import sys

import jax
import pytest

from mamba_jax.config import MambaConfig
from train import step
from train.command_line import parse, preset, presets
from train.config import TrainConfig, UserError


@pytest.mark.parametrize("name", presets())
def test_every_preset_builds_and_its_shapes_agree(name):
    config = preset(name)
    state = step.abstract_state(config)
    size = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    # Embeddings included; Mamba-3's in-projection is smaller.
    low, high = (100e6, 140e6) if "130m" in name else (1e5, 3e6)
    assert low < size < high
    assert TrainConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2", "Mamba3"])
def test_demo_takes_a_layer(layer):
    config = parse(["demo", "--layer", layer])
    assert config == parse(["demo", f"--layer={layer}"])
    assert config.model.mixer_kind == layer
    assert layer.lower() in config.directory


def test_every_field_can_be_overridden_from_the_command_line():
    arguments = (
        "demo --steps 7 --data.train a b --optimizer.schedule wsd --mesh.fsdp 2 --remat "
        "--model.d-model 64 --model.ssm-cfg.d-state 16 --model.ssm_cfg.dt-limit 0 0.5"
    )
    config = parse(arguments.split())
    assert config.steps == 7
    assert config.data.train == ("a", "b")
    assert config.optimizer.schedule == "wsd"
    assert config.mesh.fsdp == 2
    assert config.remat
    assert config.model.d_model == 64
    assert config.model.mixer.d_state == 16
    assert config.model.mixer.dt_limit == (0.0, 0.5)
    # What was not overridden stays the preset's.
    assert config.model.mixer.headdim == preset("demo").model.mixer.headdim


def test_layer_options_the_preset_leaves_at_their_default_are_options_too():
    arguments = "demo --layer Mamba3 --model.ssm-cfg.is-mimo --model.ssm-cfg.mimo-rank 2"
    config = parse(arguments.split())
    assert config.model.mixer.rank == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "preset: wanted one of demo, "),
        ("dmeo", "got 'dmeo'"),
        ("demo --layer Mamba4", "--layer: wanted one of Mamba1, Mamba2, Mamba3, got 'Mamba4'"),
        ("demo --layer", "--layer: wanted one of Mamba1, Mamba2, Mamba3, got ''"),
        ("demo --stepz 3", "--stepz: unknown option; did you mean --steps?"),
        ("demo --model.ssm-cfg.d-stat 3", "did you mean --model.ssm-cfg.d-state?"),
        ("demo --steps many", "--steps: invalid literal for int"),
        ("demo --steps 0", "steps: wanted at least 1, got 0"),
        ("demo --optimizer.schedule linear", "Expected one of ('cosine', 'wsd', 'constant')"),
        ("demo --optimizer.accumulate 3", "wanted a divisor of data.batch_size"),
        ("demo --model.ssm-cfg.headdim 48", "headdim must be a divisor of d_ssm"),
        ("demo extra", "wanted --field value, got 'extra'"),
    ],
)
def test_mistakes_are_one_line_that_says_what_was_wanted(arguments, message):
    with pytest.raises(UserError) as error:
        parse(arguments.split())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_help_lists_presets_and_documents_fields(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for text in ("mamba2_130m", "--data.seq-len", "Tokens in a row", "--model.ssm-cfg.headdim"):
        assert text in shown


def test_unknown_fields_of_a_saved_config_are_named():
    values = preset("demo").to_dict()
    values["data"]["sequence_length"] = 3
    with pytest.raises(UserError, match=r"data\.sequence_length: unknown field"):
        TrainConfig.from_dict(values)


def test_hash_tells_runs_apart_but_not_places():
    config = preset("demo")
    assert dataclasses.replace(config, output="elsewhere").hash == config.hash
    assert dataclasses.replace(config, seed=1).hash != config.hash
    model = MambaConfig.from_dict({**config.model.to_dict(), "norm_eps": 1e-6})
    assert dataclasses.replace(config, model=model).hash != config.hash


def test_a_missing_package_is_named_with_the_extra_that_brings_it():
    program = "import sys; sys.modules['grain'] = None; import train"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith(
        "ImportError: train needs grain: pip install 'mamba_jax[train]'"
    )
