# SPDX-License-Identifier: Apache-2.0
"""Files that are either whole or not there."""

import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, content: str | Callable[[Path], None]) -> None:
    """Writes a file under a temporary name and renames it.

    Args:
      path: The file; replaced when it exists.
      content: The text, or a function that writes the file it is given the path of.
    """
    # The suffix stays, since writers choose the format by it.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        if callable(content):
            content(temporary)
        else:
            temporary.write_text(content, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
