# SPDX-License-Identifier: Apache-2.0
"""The layout of the original's checkpoints: its `config.json`, its names of tensors."""

import json

from mamba_jax.checkpoint.tensor_files import PretrainedError
from mamba_jax.config import MambaConfig

TIED_HEAD_IS_WRITTEN = True


def read_config(content: dict) -> MambaConfig:
    """Returns the config of a `config.json`."""
    try:
        return MambaConfig.from_dict(content)
    except ValueError as error:
        raise PretrainedError(str(error)) from None


def write_config(config: MambaConfig, dtype: str) -> str:
    """Returns the `config.json` of a model.

    Raises:
      PretrainedError: the original's code could not run the model.
    """
    content = config.to_dict()
    if content.pop("norm_eps") != 1e-5:
        raise _cannot(f"norm_eps={config.norm_eps} (only 1e-5)")
    if content["ssm_cfg"].pop("bcdt_norm_eps", None) is not None:
        raise _cannot("bcdt_norm_eps (Falcon's norm of B, C and dt)")
    if content["ssm_cfg"].pop("A_activation", "heavy_tail") != "heavy_tail":
        raise _cannot("A_activation='softplus'")
    return json.dumps(content, indent=4) + "\n"


def file_name(name: str) -> str:
    """The name in a file of a tensor named as in mamba_ssm."""
    return name


def _cannot(what: str) -> PretrainedError:
    return PretrainedError(f"the state-spaces format cannot express {what}")
