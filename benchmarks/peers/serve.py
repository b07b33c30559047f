"""The peer's end of the pipe. Standard library only: it runs in every peer's environment."""

from collections.abc import Callable
import os
import re
import sys
import time

_WORD = re.compile(r"\w").search


def serve(step: Callable[[], object]) -> None:
  """Runs `step` once for each line read and answers with the seconds it took.

  Args:
    step: one unit of work; returns only when the work is done.
  """
  # Libraries may print: the protocol keeps the pipe to itself, they get stderr.
  pipe = os.fdopen(os.dup(1), "w", buffering=1)
  os.dup2(2, 1)
  try:
    step()
    step()
  except Exception as error:
    # The first lines of the message that hold words, not rules, without advice.
    said = [line.strip("- ").split(",")[0] for line in str(error).splitlines() if _WORD(line)]
    print("does not run:", *said[:2], file=pipe)
    raise
  print("ready", file=pipe)
  for _ in sys.stdin:
    start = time.perf_counter()
    step()
    print(time.perf_counter() - start, file=pipe)
