# SPDX-License-Identifier: Apache-2.0
"""Several processes, as on several hosts, train as one does."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mamba_jax.models import ids
from tests.mamba_jax.worker import losses, make
from tests.tolerances import assert_close

ROOT = Path(__file__).parent.parent.parent


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@pytest.mark.multidevice
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_give_the_losses_of_one(count):
    command = [sys.executable, "-m", "tests.mamba_jax.worker", str(free_port()), str(count)]
    workers = [
        subprocess.Popen(
            [*command, str(index)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    try:
        finished = [worker.communicate(timeout=300) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    wanted = losses(make(), ids(4, 17))
    assert wanted[-1] < wanted[0]
    for output, errors in finished:
        assert output, errors
        assert_close("losses", json.loads(output.splitlines()[-1]), wanted, 1e-5)
