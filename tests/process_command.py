"""`duomesh` as one of several JAX processes, for `test_jax_processes.py`: process_command.py FAULT INDEX WORD...

FAULT: what happens in step 2 of the process INDEX, or "none". It prints how many bytes of tensors it has read.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from duomesh.backends.jax import processes
from duomesh.cli.main import main
from duomesh.core.checkpoint import Checkpoint
from duomesh.core.data.sampler import Sampler
from duomesh.core.errors import DataError

fault, culprit, *words = sys.argv[1:]
is_culprit = words[words.index("--process-id") + 1] == culprit
batches, close = Sampler.batches, Checkpoint.close


def failing(self: Sampler, first: int, *sizes: int) -> Any:
    if first and is_culprit and fault == "raise":
        raise ValueError("boom")
    if first and is_culprit and fault == "user error":
        raise DataError("this cannot be done. Do something else.")
    if first and is_culprit and fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return batches(self, first, *sizes)


def closing(self: Checkpoint) -> None:
    close(self)
    print(f"bytes read: {self.num_bytes_read}")


Sampler.batches = failing  # type: ignore[method-assign]
Checkpoint.close = closing  # type: ignore[method-assign]
if fault == "absent":
    processes._START_S = 2
if fault == "wrong setting" and is_culprit:
    words.append("optimizer.eps=-1")
if fault == "other setting" and is_culprit:
    words.append("optimizer.lr=0.5")

if __name__ == "__main__":
    sys.exit(main(words))
