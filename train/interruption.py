# SPDX-License-Identifier: Apache-2.0
"""SIGTERM and Ctrl-C: the loop finishes its step, the run is saved and the program ends.

With several processes JAX's preemption service has SIGTERM and agrees on one step for all of them;
alone, a handler sets a flag. A second Ctrl-C stops at once.
"""

import signal
from types import FrameType

import jax

from mamba_jax.checkpoint.store import CheckpointStore


class Interruption:
    """Knows whether the run has been asked to stop; a context manager.

    Attributes:
      asked: The signal's name once it came, else "".
    """

    def __init__(self) -> None:
        self.asked = ""
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Interruption":
        signals = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGINT, signal.SIGTERM]
        for number in signals:
            try:
                self._previous[number] = signal.signal(number, self._note)
            except ValueError:
                # Handlers can only be set in the main thread; elsewhere the caller has them.
                break
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def reached(self, step: int, store: CheckpointStore) -> bool:
        """Whether to stop after step `step`; the same answer on every process."""
        if jax.process_count() > 1:
            if store.reached_preemption(step):
                self.asked = "SIGTERM"
            return self.asked == "SIGTERM"
        return bool(self.asked)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name
