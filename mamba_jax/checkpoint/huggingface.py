# SPDX-License-Identifier: Apache-2.0
"""The layout of Hugging Face transformers: MambaForCausalLM, Mamba2ForCausalLM and
FalconMambaForCausalLM. Tensors are those of the original but for the embedding's name; the config
has words of its own."""

import dataclasses
import json
from typing import Any

from mamba_jax.checkpoint.tensor_files import PretrainedError
from mamba_jax.config import Mamba1Config, Mamba2Config, MambaConfig

TIED_HEAD_IS_WRITTEN = False

_ARCHITECTURES = {
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
}
# Ours → theirs.
_SHARED = {
    "d_state": "state_size",
    "d_conv": "conv_kernel",
    "dt_min": "time_step_min",
    "dt_max": "time_step_max",
    "dt_init_floor": "time_step_floor",
    "bias": "use_bias",
    "conv_bias": "use_conv_bias",
}
_MAMBA1 = _SHARED | {
    "dt_rank": "time_step_rank",
    "dt_init": "time_step_init_scheme",
    "dt_scale": "time_step_scale",
}
_MAMBA2 = _SHARED | {
    "headdim": "head_dim",
    "ngroups": "n_groups",
    "chunk_size": "chunk_size",
    "dt_limit": "time_step_limit",
}
# What transformers assumes when a config.json leaves it out and ours would assume otherwise.
_MAMBA2_DEFAULTS = {"state_size": 128, "n_groups": 8, "head_dim": 64, "vocab_size": 32768}


def read_config(content: dict) -> MambaConfig:
    """Returns the config of a transformers `config.json`.

    Raises:
      PretrainedError: another architecture, or an option that has no counterpart.
    """
    kind = content.get("model_type")
    if kind not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise PretrainedError(f"model_type must be one of {known}; got {kind!r}")
    if content.get("hidden_act", "silu") != "silu":
        raise PretrainedError(f"hidden_act must be 'silu'; got {content['hidden_act']!r}")
    is_mamba2 = kind == "mamba2"
    if is_mamba2:
        content = _MAMBA2_DEFAULTS | content
    try:
        d_model, eps = content["hidden_size"], content.get("layer_norm_epsilon", 1e-5)
        expand = content.get("expand", 2)
        if not is_mamba2 and content.get("intermediate_size"):
            # Falcon's files state an `expand` that their own code does not use.
            expand = content["intermediate_size"] / d_model
        options = {
            ours: _plain(content[theirs])
            for ours, theirs in (_MAMBA2 if is_mamba2 else _MAMBA1).items()
            if theirs in content
        }
        options |= {"d_model": d_model, "expand": int(expand) if expand == int(expand) else expand}
        if kind == "falcon_mamba":
            options["bcdt_norm_eps"] = content.get("mixer_rms_eps", 1e-6)
        mixer = (Mamba2Config if is_mamba2 else Mamba1Config).from_dict(options)
        if is_mamba2 and content.get("num_heads", mixer.nheads) != mixer.nheads:
            wanted = f"expand · hidden_size / head_dim = {mixer.nheads}"
            raise ValueError(f"num_heads must be {wanted}; got {content['num_heads']}")
        if is_mamba2 and eps != 1e-5:
            raise ValueError(f"layer_norm_epsilon must be 1e-5 in Mamba-2 models; got {eps}")
        return MambaConfig(
            d_model=d_model,
            n_layer=content["num_hidden_layers"],
            vocab_size=content["vocab_size"],
            ssm_cfg={"layer": "Mamba2" if is_mamba2 else "Mamba1", **_non_default(mixer)},
            residual_in_fp32=content.get("residual_in_fp32", True),
            pad_vocab_size_multiple=1,
            tie_embeddings=content.get("tie_word_embeddings", not is_mamba2),
            norm_eps=float(eps),
        )
    except KeyError as error:
        raise PretrainedError(f"config.json lacks {error}") from None
    except (ValueError, TypeError) as error:
        raise PretrainedError(str(error)) from None


def write_config(config: MambaConfig, dtype: str) -> str:
    """Returns the `config.json` of a model for transformers.

    Raises:
      PretrainedError: transformers has no architecture that computes the model.
    """
    kind = _model_type(config)
    mixer = config.mixer
    content: dict[str, Any] = {
        theirs: getattr(mixer, ours)
        for ours, theirs in (_MAMBA2 if kind == "mamba2" else _MAMBA1).items()
    }
    content |= {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "dtype": dtype,
        "hidden_act": "silu",
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layer,
        "vocab_size": config.padded_vocab_size,
        "expand": mixer.expand,
        "layer_norm_epsilon": config.norm_eps,
        "residual_in_fp32": config.residual_in_fp32,
        "tie_word_embeddings": config.tie_embeddings,
    }
    if kind == "mamba2":
        content["num_heads"] = mixer.nheads
    else:
        content |= {"intermediate_size": mixer.d_inner, "time_step_rank": mixer.rank}
    if kind == "falcon_mamba":
        content["mixer_rms_eps"] = mixer.bcdt_norm_eps
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def file_name(name: str) -> str:
    """The name in a file of a tensor named as in mamba_ssm."""
    return name.replace("backbone.embedding.", "backbone.embeddings.")


def _model_type(config: MambaConfig) -> str:
    mixer = config.mixer
    obstacles = {
        "attention layers": bool(config.attn_layer_idx),
        "d_intermediate": config.d_intermediate != 0,
        "rms_norm=False": not config.rms_norm,
        "Mamba-3 layers": config.mixer_kind == "Mamba3",
    }
    if isinstance(mixer, Mamba2Config):
        obstacles |= {
            "d_ssm": mixer.d_mlp != 0,
            "D_has_hdim": mixer.D_has_hdim,
            "rmsnorm=False": not mixer.rmsnorm,
            "norm_before_gate": mixer.norm_before_gate,
            "norm_eps other than 1e-5": config.norm_eps != 1e-5,
        }
    present = [name for name, is_there in obstacles.items() if is_there]
    if present:
        raise PretrainedError(f"the hf format cannot express {', '.join(present)}")
    if isinstance(mixer, Mamba2Config):
        return "mamba2"
    return "mamba" if mixer.bcdt_norm_eps is None else "falcon_mamba"


def _non_default(mixer: Mamba1Config | Mamba2Config) -> dict[str, Any]:
    """A mixer's options that differ from the defaults."""
    return {
        field.name: getattr(mixer, field.name)
        for field in dataclasses.fields(mixer)
        if field.name != "d_model" and getattr(mixer, field.name) != field.default
    }


def _plain(value: Any) -> Any:
    """Reads {"__float__": "Infinity"}, which transformers writes for numbers JSON lacks."""
    if isinstance(value, dict) and set(value) == {"__float__"}:
        return float(value["__float__"].replace("Infinity", "inf"))
    return [_plain(item) for item in value] if isinstance(value, list) else value
