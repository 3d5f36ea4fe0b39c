# SPDX-License-Identifier: Apache-2.0
"""From a command line to a TrainConfig: `PRESET [--layer L] [--field value ...]`.

A preset is a function in `configs/`; tyro then makes an option of every field of what it returns.
Mistakes become one line (UserError) instead of tyro's box or a traceback.
"""

import contextlib
import dataclasses
import difflib
import importlib
import inspect
import io
import pkgutil
import typing
from collections.abc import Sequence
from typing import Any

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from mamba_jax.config import Mamba1Config, Mamba2Config, Mamba3Config, MambaConfig
from train import configs
from train.config import TrainConfig, UserError

_MIXERS = {"Mamba1": Mamba1Config, "Mamba2": Mamba2Config, "Mamba3": Mamba3Config}


def parse(arguments: Sequence[str]) -> TrainConfig:
    """Resolves the arguments of `python -m train`.

    Raises:
      UserError: an unknown preset, option or value.
      SystemExit: help was asked for.
    """
    names = presets()
    if not arguments or arguments[0] in ("-h", "--help"):
        if not arguments:
            raise UserError(f"preset: wanted one of {', '.join(names)}, got nothing")
        arguments = ["demo", *arguments]
    name, *rest = arguments
    if name.replace("-", "_") not in names:
        raise UserError(f"preset: wanted one of {', '.join(names)}, got {name!r}")
    default, rest = _preset(name.replace("-", "_"), rest)
    description = (
        f"Trains a Mamba language model. Presets: {', '.join(names)}. "
        f"The defaults below are those of {name}."
    )
    return _overridden(default, rest, f"python -m train {name}", description)


def presets() -> list[str]:
    """Names of the presets: the modules in `configs/`."""
    return sorted(module.name for module in pkgutil.iter_modules(configs.__path__))


def preset(name: str, **options: Any) -> TrainConfig:
    """The config of a preset; `options` are its function's own (the demo's layer)."""
    return importlib.import_module(f"train.configs.{name}").config(**options)


def _preset(name: str, arguments: list[str]) -> tuple[TrainConfig, list[str]]:
    """Takes `--layer L` out of the arguments for presets whose function has a `layer`."""
    function = importlib.import_module(f"train.configs.{name}").config
    if "layer" not in inspect.signature(function).parameters:
        return function(), arguments
    layer, rest = "Mamba2", list(arguments)
    for index, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option == "--layer":
            value = value if equals else "".join(arguments[index + 1 : index + 2])
            layer, rest = value, arguments[:index] + arguments[index + (1 if equals else 2) :]
            break
    if layer not in _MIXERS:
        raise UserError(f"--layer: wanted one of {', '.join(_MIXERS)}, got {layer!r}")
    return function(layer=layer), rest


def _overridden(
    default: TrainConfig, arguments: Sequence[str], program: str, description: str
) -> TrainConfig:
    registry = ConstructorRegistry()
    registry.struct_rule(_options_of_model)
    box = io.StringIO()
    try:
        with registry, contextlib.redirect_stderr(box):
            config, unknown = tyro.cli(
                TrainConfig,
                default=default,
                args=list(arguments),
                prog=program,
                description=description,
                return_unknown_args=True,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(_one_line(box.getvalue())) from None
    if unknown:
        raise UserError(_unknown_option(unknown[0], default))
    return config


def _unknown_option(option: str, default: TrainConfig) -> str:
    if not option.startswith("--"):
        return f"command line: wanted --field value, got {option!r}"
    known = _flags(default.to_dict()) + _flags(
        {"ssm_cfg": dataclasses.asdict(default.model.mixer)}, "--model."
    )
    name = option.partition("=")[0].replace("_", "-")
    near = difflib.get_close_matches(name, known, n=1)
    wanted = f"did you mean {near[0]}?" if near else "--help lists them"
    return f"{name}: unknown option; {wanted}"


def _flags(values: dict[str, Any], prefix: str = "--") -> list[str]:
    flags = []
    for name, value in values.items():
        flag = prefix + name.replace("_", "-")
        flags += _flags(value, f"{flag}.") if isinstance(value, dict) else [flag]
    return flags


def _one_line(box: str) -> str:
    """The message inside tyro's box, without its frame and its help."""
    lines = []
    for line in box.splitlines()[1:]:
        line = line.strip("│╭╮╰╯ ")
        if line.startswith("──"):
            break
        lines.append(line)
    message = " ".join(lines).removeprefix("Error parsing ").strip()
    return message.removeprefix("TrainConfig: ") or "command line: not understood"


def _options_of_model(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Makes the mixer's typed options reachable as --model.ssm-cfg.FIELD.

    `MambaConfig.ssm_cfg` is a dictionary, as in the files it comes from; on the command line its
    entries are those of the preset's mixer, with their types.
    """
    if info.type is MambaConfig and isinstance(info.default, MambaConfig):
        return _struct(MambaConfig, info.default, _model_from_options(info.default))
    if info.type in _MIXERS.values():
        return _struct(info.type, info.default, _changed(info.type), skip=("d_model",))
    return None


def _struct(kind, default, instantiate, skip=()) -> StructConstructorSpec:
    hints = typing.get_type_hints(kind)
    fields = []
    for field in dataclasses.fields(kind):
        type_, value = hints[field.name], getattr(default, field.name)
        if field.name == "ssm_cfg":
            type_, value = type(default.mixer), default.mixer
        if field.name == "attn_cfg":
            # A dictionary's entries become options; hybrids' presets spell what they set.
            skip = skip if value else (*skip, "attn_cfg")
        if field.name not in skip:
            help_ = _documented(kind).get(field.name, "")
            fields.append(
                StructFieldSpec(name=field.name, type=type_, default=value, helptext=help_)
            )
    return StructConstructorSpec(instantiate=instantiate, fields=tuple(fields))


def _model_from_options(default: MambaConfig):
    def build(ssm_cfg: dict, **fields: Any) -> MambaConfig:
        options = {"layer": default.mixer_kind, **ssm_cfg}
        return MambaConfig(ssm_cfg=options, **fields)

    return build


def _changed(kind: type):
    """Keeps the options that differ from the mixer's defaults: what its files would say."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}

    def build(**options: Any) -> dict[str, Any]:
        return {name: value for name, value in options.items() if value != defaults[name]}

    return build


def _documented(kind: type) -> dict[str, str]:
    """The Attributes section of a class, by field; one entry may document several fields."""
    section = inspect.getdoc(kind).partition("Attributes:\n")[2]
    documented: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        head, colon, text = line.strip().partition(": ")
        if colon and line.startswith("  ") and not line.startswith("   "):
            names = [name.strip() for name in head.split(",")]
            line = text
        for name in names:
            documented[name] = f"{documented.get(name, '')} {line.strip()}".strip()
    return documented
