"""A loader in a process that was forked from its own ends in an error, never in a hang; the parent reads on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from shardio.errors import ReadError
from shardsets import BatchError, DomainDataLoader

loader = DomainDataLoader(sys.argv[1], prefetch=int(sys.argv[2]), target_steps=0)
batches = iter(loader)
next(batches)
for begun, said in ((True, (BatchError, ReadError)), (False, ReadError)):
    pid = os.fork()
    if not pid:
        signal.alarm(30)
        code = 1
        try:
            list(batches if begun else loader)
            print("threads of another process have answered", flush=True)
        except said as error:
            code = 0 if "was forked from it" in str(error) else 2
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, begun
assert [int(batch["index"]) for batch in batches] == list(range(1, 12))
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_is_told(store):
    """Case R6: the parent has read a batch on its threads; the child is refused, in that iteration and in a new one."""
    program = "import shardio.team; shardio.team.usable_cores = lambda: 2\n" + PROGRAM  # or it reads without threads
    command = [sys.executable, "-W", "ignore", "-c", program, str(store), "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout == "done\n", done.stdout + done.stderr
