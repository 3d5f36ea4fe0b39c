# SPDX-License-Identifier: Apache-2.0
"""How the programs end: a mistake of the user is one line and exit code 2, never a traceback."""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from mamba_jax.checkpoint.store import CheckpointError
from train.config import UserError


class TrainingFailed(RuntimeError):
    """The run cannot go on (exit code 1); the message says why and what was kept."""


def exit_with(main: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> NoReturn:
    """Runs a program's main function and exits with 0, 1 (the run failed) or 2 (a mistake).

    Errors that are ours keep their traceback.
    """
    # Orbax logs every file it opens, and damage that is reported in one line of ours.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        main(arguments)
    except (UserError, CheckpointError, NotImplementedError) as error:
        _end(f"error: {error}", 2)
    except TrainingFailed as error:
        _end(f"failed: {error}", 1)
    except KeyboardInterrupt:
        _end("stopped at once; what came after the last checkpoint is lost", 130)
    sys.exit(0)


def _end(line: str, code: int) -> NoReturn:
    sys.stderr.write(" ".join(line.split()) + "\n")
    sys.exit(code)
