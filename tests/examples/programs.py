"""Starts programs of the examples as a user does, and ends them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@dataclass(frozen=True)
class Run:
    """Started programs and where they write what they say."""

    processes: Sequence[subprocess.Popen[bytes]]
    log: Path

    def finish(self, seconds: float = 300) -> str:
        """Wait for all; what they said. None may fail."""
        codes = self.wait(seconds)
        assert not any(codes), self.log.read_text()
        return self.log.read_text()

    def wait(self, seconds: float = 300) -> list[int]:
        """Wait for all; their exit codes."""
        deadline = time.monotonic() + seconds
        try:
            return [process.wait(max(1.0, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            for process in self.processes:
                process.terminate()  # which torchrun passes on to its ranks
            pytest.fail(f"not done after {seconds} s: {self.log.read_text()}")

    def kill(self) -> None:
        """Kill all without a word of warning."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def start(log: Path, program: str, *options: str | Path, torchrun: int = 0, ranks: int = 1) -> Run:
    """Start a program of the examples: alone, under torchrun, or as ranks that another launcher would start.

    Args:
        log: file for what it says; added to.
        program: path below the folder of examples.
        options: its arguments.
        torchrun: ranks to start by torchrun; 0 to go without.
        ranks: ranks to start directly.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(torchrun)] if torchrun else []
    command = [sys.executable, *launcher, str(EXAMPLES / program), *map(str, options)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "OMP_NUM_THREADS": "1"}
    if ranks > 1:
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    environments = [
        shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else shared for rank in range(ranks)
    ]
    with log.open("a") as file:
        return Run([subprocess.Popen(command, stdout=file, stderr=file, env=one) for one in environments], log)
