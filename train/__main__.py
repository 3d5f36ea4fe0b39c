# SPDX-License-Identifier: Apache-2.0
"""`python -m train PRESET [--field value ...]`; --help lists presets and fields."""

import sys

from train.errors import exit_with
from train.train import main

if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
