# SPDX-License-Identifier: Apache-2.0
"""What a run is: frozen, documented dataclasses; each field is an option of `python -m train`.

Owns the fields, their checks and their form as JSON. `command_line.py` fills them, `configs/` holds
complete examples. The resolved config is saved with the run and inside every checkpoint.
"""

import dataclasses
import hashlib
import json
import typing
from collections.abc import Mapping
from typing import Any, Literal

from mamba_jax.config import MambaConfig

# Where a run is kept, how it is watched and how long it goes on: what may differ on --resume.
MAY_CHANGE_ON_RESUME = (
    "name",
    "output",
    "resume",
    "overwrite",
    "steps",
    "log_every",
    "max_bad_steps",
    "mesh",
    "evaluation",
    "checkpoint",
    "sample",
)
_NOT_HASHED = ("output", "resume", "overwrite")


class UserError(ValueError):
    """A mistake of the person who runs the program: one line that says what, wanted, got."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, and how it is cut into rows.

    Attributes:
      train: Text files, directories, patterns with *, .jsonl files, token arrays (.npy, .bin), or "python-stdlib" for the standard library's own source.
      validation: Like train; when empty, whole documents are held back from train.
      glob: Which files of a directory are read.
      validation_fraction: Share of the tokens held back when validation is empty.
      tokenizer: "bytes" (a token is a byte, no file needed), a tokenizers JSON file, or "none" for token arrays alone.
      text_field: Field of a .jsonl line that holds the text.
      end_id: Token that ends a document; the tokenizer's own when omitted.
      bin_dtype: Type of the tokens in .bin files; .npy files carry theirs.
      seq_len: Tokens in a row, t.
      batch_size: Rows of one optimizer step, on all processes together.
    """  # noqa: E501  one line each, as the command line's help shows them

    train: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    glob: str = "**/*"
    validation_fraction: float = 0.01
    tokenizer: str = "bytes"
    text_field: str = "text"
    end_id: int | None = None
    bin_dtype: Literal["uint8", "uint16", "int32", "uint32", "int64"] = "uint16"
    seq_len: int = 1024
    batch_size: int = 16

    def __post_init__(self):
        _require(self.seq_len >= 1, "data.seq_len", "at least 1", self.seq_len)
        _require(self.batch_size >= 1, "data.batch_size", "at least 1", self.batch_size)
        fraction = self.validation_fraction
        _require(0 < fraction < 1, "data.validation_fraction", "between 0 and 1", fraction)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning rate over time.

    Attributes:
      learning_rate: The peak.
      schedule: After the warm-up: "cosine" falls to final_ratio over the whole run; "wsd" stays at the peak and falls linearly over the last decay_fraction; "constant" stays.
      warmup_steps: Steps over which the rate rises linearly.
      final_ratio: Last learning rate as a share of the peak.
      decay_fraction: Share of the steps in which "wsd" falls.
      b1: Decay of the gradients' running mean.
      b2: Decay of the squared gradients' running mean.
      eps: Added to the root of the second moment.
      weight_decay: Decoupled decay of the parameters marked for it (never A_log, D, biases, norms).
      clip_norm: Gradients are scaled down to this global norm.
      accumulate: Parts a batch is cut into; gradients are summed over them, weighted by their real tokens.
    """  # noqa: E501

    learning_rate: float = 3e-3
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = 100
    final_ratio: float = 0.1
    decay_fraction: float = 0.2
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    accumulate: int = 1

    def __post_init__(self):
        for field in ("learning_rate", "eps", "clip_norm", "accumulate"):
            value = getattr(self, field)
            _require(value > 0, f"optimizer.{field}", "greater than 0", value)
        for field in ("warmup_steps", "weight_decay"):
            value = getattr(self, field)
            _require(value >= 0, f"optimizer.{field}", "at least 0", value)
        for field in ("final_ratio", "decay_fraction"):
            value = getattr(self, field)
            _require(0 <= value <= 1, f"optimizer.{field}", "in 0 ... 1", value)
        for field in ("b1", "b2"):
            value = getattr(self, field)
            _require(0 <= value < 1, f"optimizer.{field}", "at least 0 and below 1", value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices each mesh axis has; their product is the number of devices used.

    Attributes:
      data: Replicas that each take a share of the batch; 0 for all devices that are left.
      fsdp: Devices that share parameters and optimizer state.
      tensor: Devices that share heads, channels and vocabulary.
      sequence: Devices that share the time axis.
    """

    data: int = 0
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1

    def __post_init__(self):
        _require(self.data >= 0, "mesh.data", "at least 0", self.data)
        for field in ("fsdp", "tensor", "sequence"):
            value = getattr(self, field)
            _require(value >= 1, f"mesh.{field}", "at least 1", value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When the validation loss is measured.

    Attributes:
      every: Steps between two evaluations; 0 for only before and after the run.
      batches: Batches per evaluation; 0 for the whole validation set.
    """

    every: int = 500
    batches: int = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved.

    Attributes:
      every: Steps between two checkpoints; 0 for only the end (and SIGTERM or Ctrl-C).
      keep: Newest checkpoints kept.
    """

    every: int = 1000
    keep: int = 3

    def __post_init__(self):
        _require(self.every >= 0, "checkpoint.every", "at least 0", self.every)
        _require(self.keep >= 1, "checkpoint.keep", "at least 1", self.keep)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The text written after the run.

    Attributes:
      prompt: What the text starts with; may be empty.
      tokens: Tokens generated; 0 for none.
      temperature: Randomness; 0 takes the most probable token.
      top_p: Only the most probable tokens of this total probability are drawn from.
      seed: Seed of the draws.
    """

    prompt: str = ""
    tokens: int = 200
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    Attributes:
      model: The architecture.
      data: What is read.
      optimizer: AdamW and the learning rate.
      mesh: The devices.
      evaluation: When the validation loss is measured.
      checkpoint: When the run is saved.
      sample: The text written after the run.
      name: The run's name.
      output: The run's directory; runs/<name> when empty.
      resume: Whether to go on from the newest checkpoint in output, if there is one.
      overwrite: Whether to replace a run that output already holds (not with resume).
      steps: Optimizer steps of the whole run.
      seed: Seed of the initial weights, the documents' order and the rows' order.
      init_from: Published checkpoint (directory or hub id) whose weights are the initial ones; drawn when empty.
      compute_dtype: Type of activations and matrix products; weights are always kept in float32.
      remat: Whether layers are computed again in the backward pass instead of being stored.
      unroll: Layers per iteration of the loop over layers.
      implementation: Which implementation of the operations; the best one when omitted.
      loss_chunk: Tokens of each row whose logits exist at one time.
      log_every: Steps between two lines of progress.
      max_bad_steps: The run stops after this many steps in a row with a non-finite loss or gradient.
    """  # noqa: E501

    model: MambaConfig
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    sample: SampleConfig = dataclasses.field(default_factory=SampleConfig)
    name: str = "run"
    output: str = ""
    resume: bool = False
    overwrite: bool = False
    steps: int = 1000
    seed: int = 0
    init_from: str = ""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    remat: bool = False
    unroll: int = 1
    implementation: str | None = None
    loss_chunk: int = 256
    log_every: int = 10
    max_bad_steps: int = 10

    def __post_init__(self):
        for field in ("steps", "unroll", "loss_chunk", "log_every", "max_bad_steps"):
            value = getattr(self, field)
            _require(value >= 1, field, "at least 1", value)
        rows, parts = self.data.batch_size, self.optimizer.accumulate
        wanted = f"a divisor of data.batch_size={rows}"
        _require(rows % parts == 0, "optimizer.accumulate", wanted, parts)

    @property
    def directory(self) -> str:
        """Where the run is kept."""
        return self.output or f"runs/{self.name}"

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-compatible values; `from_dict` reads them back."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values = {
            name: value.to_dict()
            if isinstance(value, MambaConfig)
            else (dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value)
            for name, value in fields.items()
        }
        return json.loads(json.dumps(values))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainConfig":
        """Builds the config from a mapping; an unknown field is a ValueError."""
        return _build(cls, values, "")

    @property
    def hash(self) -> str:
        """Twelve hexadecimal digits that tell two different runs apart (output is left out)."""
        values = {k: v for k, v in self.to_dict().items() if k not in _NOT_HASHED}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def _require(condition: bool, field: str, wanted: str, got: Any) -> None:
    if not condition:
        raise UserError(f"{field}: wanted {wanted}, got {got}")


def _build(kind: type, values: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(kind)
    unknown = [name for name in values if name not in hints]
    if unknown:
        raise UserError(
            f"{prefix}{unknown[0]}: unknown field, wanted one of {', '.join(sorted(hints))}"
        )
    built = {}
    for name, value in values.items():
        if hints[name] is MambaConfig:
            value = MambaConfig.from_dict(value)
        elif dataclasses.is_dataclass(hints[name]):
            value = _build(hints[name], value, f"{prefix}{name}.")
        elif typing.get_origin(hints[name]) is tuple:
            value = tuple(value)
        built[name] = value
    return kind(**built)
