# SPDX-License-Identifier: Apache-2.0
"""A config says what it is, refuses what it cannot be, and survives a round trip."""

import json

import pytest

from mamba_jax import MambaConfig
from mamba_jax.config import AttentionConfig, Mamba1Config, Mamba2Config, Mamba3Config
from tests.golden import DATA


@pytest.mark.parametrize("name", sorted(path.name for path in DATA.glob("lm_*")))
def test_config_files_of_the_original_load_unchanged(name):
    path = DATA / name / "config.json"
    config = MambaConfig.from_json(path)
    written = config.to_dict()
    assert {key: written[key] for key in json.loads(path.read_text())} == json.loads(
        path.read_text()
    )
    assert MambaConfig.from_dict(written) == config
    assert hash(MambaConfig.from_dict(written)) == hash(config)


def test_defaults_are_the_originals():
    assert MambaConfig().padded_vocab_size == 50280
    assert MambaConfig(pad_vocab_size_multiple=16).padded_vocab_size == 50288
    assert Mamba1Config(d_model=768).rank == 48
    assert Mamba2Config(d_model=768).nheads == 24
    assert Mamba3Config(d_model=768).num_angles == 32
    assert Mamba3Config(d_model=768, rope_fraction=1.0).num_angles == 64
    assert Mamba3Config(d_model=768).rank == 1
    assert Mamba3Config(d_model=768, is_mimo=True).rank == 4
    assert AttentionConfig(d_model=64, num_heads=4, mlp_dim=300).d_mlp == 256


def test_equal_consecutive_layers_form_runs():
    config = MambaConfig(n_layer=6, attn_layer_idx=(1, 2, 5), attn_cfg={"num_heads": 4})
    assert config.runs == (
        ("Mamba1", 0, 1),
        ("attention", 1, 2),
        ("Mamba1", 3, 2),
        ("attention", 5, 1),
    )


def test_switches_between_the_originals_kernels_are_dropped():
    config = MambaConfig(ssm_cfg={"layer": "Mamba2", "use_mem_eff_path": False})
    assert config.mixer == Mamba2Config(d_model=2560)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_modell": 4}, r"unknown field 'd_modell'; did you mean 'd_model'\?"),
        ({"n_layer": "4"}, r"n_layer must be int; got '4'"),
        ({"n_layer": True}, r"n_layer must be int; got True"),
        ({"n_layer": 0}, r"n_layer must be greater than 0; got 0"),
        ({"d_intermediate": -1}, r"d_intermediate must be at least 0; got -1"),
        ({"ssm_cfg": {"layer": "Mamba4"}}, r"Mamba1, Mamba2, Mamba3; got 'Mamba4'"),
        ({"ssm_cfg": {"d_stat": 4}}, r"Mamba1Config: unknown field 'd_stat'; did you mean"),
        (
            {"d_model": 100, "ssm_cfg": {"layer": "Mamba2", "headdim": 64}},
            r"headdim must be a divisor of d_ssm=200; got 64",
        ),
        (
            {"d_model": 128, "ssm_cfg": {"layer": "Mamba2", "ngroups": 3}},
            r"ngroups must be a divisor of the number of heads 4; got 3",
        ),
        (
            {"d_model": 100, "ssm_cfg": {"layer": "Mamba3"}},
            r"headdim must be a divisor of d_inner=200; got 64",
        ),
        (
            {"ssm_cfg": {"layer": "Mamba3", "rope_fraction": 0.7}},
            r"rope_fraction must be 0.5 or 1.0; got 0.7",
        ),
        ({"ssm_cfg": {"layer": "Mamba2", "dt_limit": [0.5]}}, r"dt_limit must be tuple"),
        ({"ssm_cfg": {"layer": "Mamba2", "dt_limit": [2, 1]}}, r"0 <= low <= high; got \(2, 1\)"),
        ({"attn_layer_idx": [64], "attn_cfg": {"num_heads": 4}}, r"attn_layer_idx must be in 0"),
        ({"attn_layer_idx": [1]}, r"attn_layer_idx needs attn_cfg"),
        ({"attn_layer_idx": [1], "attn_cfg": {"causal": True}}, r"missing field 'num_heads'"),
        (
            {"d_model": 64, "attn_layer_idx": [1], "attn_cfg": {"num_heads": 4, "num_heads_kv": 3}},
            r"num_heads_kv must be a divisor of num_heads=4; got 3",
        ),
    ],
)
def test_bad_values_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        MambaConfig.from_dict(fields)


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read config .*nowhere.json"):
        MambaConfig.from_json(tmp_path / "nowhere.json")
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(ValueError, match=r"config.json: "):
        MambaConfig.from_json(broken)
