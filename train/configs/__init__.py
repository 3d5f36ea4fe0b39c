# SPDX-License-Identifier: Apache-2.0
"""Presets: every module here has a function `config` that returns a complete TrainConfig."""
