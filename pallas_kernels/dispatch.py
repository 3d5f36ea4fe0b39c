# SPDX-License-Identifier: Apache-2.0
"""Chooses an implementation of an operation, and says why.

An implementation is a module with two functions:

    supports(device, arguments) -> str | None   None when it can run, else the reason it cannot
    run(**arguments)                            the operation itself

`arguments` is the dictionary of the op's canonical, already validated arguments. Each op's `api.py`
lists its implementations from most to least preferred and ends in one call of `run`. Nothing here
reads environment variables, and no choice is made at import.
"""

import contextlib
import contextvars
import dataclasses
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from pallas_kernels import devices

_log = logging.getLogger("pallas_kernels")


@dataclasses.dataclass(frozen=True)
class Operation:
    """A named operation and its implementations in order of preference.

    Attributes:
      name: The public function's name.
      implementations: Implementation name → module path, most preferred first; modules are
        imported when first considered, so that a kernel costs nothing where it cannot run.
    """

    name: str
    implementations: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Decision:
    """One choice: which implementation ran `operation`, and why not the others before it."""

    operation: str
    chosen: str
    device: devices.Device
    refused: Mapping[str, str]
    arguments: Mapping[str, str]

    def __str__(self) -> str:
        shapes = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        lines = [f"{self.operation}({shapes})", f"  on {self.device}: {self.chosen}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The decisions made while tracing a function, in order, each listed once."""

    decisions: tuple[Decision, ...]

    def __str__(self) -> str:
        return "\n".join(str(decision) for decision in self.decisions) or "no operation was called"


_recorder: contextvars.ContextVar[list[Decision] | None] = contextvars.ContextVar(
    "recorder", default=None
)
_logged: set[tuple[str, str, str]] = set()


def run(operation: Operation, arguments: dict[str, Any], implementation: str | None) -> Any:
    """Runs `operation` with the named implementation, or with the first that supports the call.

    Raises:
      ValueError: `implementation` is no name this operation has.
      NotImplementedError: the named implementation cannot run this call; each reason is given.
    """
    decision = decide(operation, arguments, implementation)
    if (recorder := _recorder.get()) is not None and decision not in recorder:
        recorder.append(decision)
    key = (operation.name, decision.chosen, str(decision.refused))
    if key not in _logged:
        _logged.add(key)
        _log.info("%s", decision)
    with jax.named_scope(f"{operation.name}_{decision.chosen}"):
        return _module(operation, decision.chosen).run(**arguments)


def decide(operation: Operation, arguments: dict[str, Any], implementation: str | None) -> Decision:
    """Returns the choice `run` would make; see there for the errors."""
    names = list(operation.implementations)
    if implementation is not None and implementation not in names:
        raise ValueError(
            f"{operation.name}: implementation must be None or one of {', '.join(names)}; "
            f"got {implementation!r}"
        )
    device = devices.target_device()
    refused: dict[str, str] = {}
    for name in names if implementation is None else [implementation]:
        reason = _module(operation, name).supports(device, arguments)
        if reason is None:
            return Decision(operation.name, name, device, refused, _shapes(arguments))
        refused[name] = reason
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    raise NotImplementedError(f"{operation.name} cannot run on {device}: {reasons}")


def explain(
    function: Callable[..., Any],
    *args: Any,
    device: devices.Device | None = None,
    **kwargs: Any,
) -> Explanation:
    """Says which implementations `function` would use and why, without running anything.

    Args:
      function: An operation (`pallas_kernels.ssd`) or any JAX function that calls some.
      *args, **kwargs: Its arguments; arrays may be `jax.ShapeDtypeStruct`s.
      device: The device to decide for (e.g. `devices.H200`); this machine's when omitted.

    Returns:
      The decisions, printable.
    """
    arrays = {name: value for name, value in kwargs.items() if _is_array(value)}
    options = {name: value for name, value in kwargs.items() if name not in arrays}
    with contextlib.ExitStack() as stack:
        if device is not None:
            stack.enter_context(devices.assume(device))
        decisions = stack.enter_context(_recording())
        # A fresh function object: a cached trace of `function` would record nothing.
        jax.eval_shape(lambda *a, **k: function(*a, **k, **options), *args, **arrays)
    return Explanation(tuple(decisions))


@contextlib.contextmanager
def _recording() -> Iterator[list[Decision]]:
    decisions: list[Decision] = []
    token = _recorder.set(decisions)
    try:
        yield decisions
    finally:
        _recorder.reset(token)


def _module(operation: Operation, name: str) -> Any:
    return importlib.import_module(operation.implementations[name])


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _shapes(arguments: Mapping[str, Any]) -> dict[str, str]:
    described = {}
    for name, value in arguments.items():
        if _is_array(value):
            described[name] = f"{value.dtype}{list(value.shape)}".replace(" ", "")
        elif value is not None and not isinstance(value, tuple):
            described[name] = repr(value)
    return described
