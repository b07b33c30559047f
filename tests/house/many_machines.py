"""A process of a program of the page "On many machines"; test_many_machines.py starts several.

``python -m tests.house.many_machines FORM WHAT``: with "whole" as the page has it; otherwise the
last process gets a signal (preempted) or an error (broken) before the sixth step.
"""

import os
import pathlib
import signal
import sys
from typing import Any

from tests.house import pages

PAGE = pathlib.Path(__file__).parents[2] / "docs/guides/many_machines.md"


def main() -> None:
  """Runs the program."""
  form, what = sys.argv[1:]
  *blocks, trainings = pages.programs(PAGE)[form]
  page: dict[str, Any] = {}
  exec(compile("\n".join(blocks), form, "exec"), page)
  if what == "whole":
    exec(compile(trainings, form, "exec"), page)
    return
  load_batch, jax, loaded = page["load_batch"], page["jax"], []

  def load(mesh: Any, i: int) -> Any:
    loaded.append(i)
    if i == 5 and jax.process_index() == jax.process_count() - 1:
      if what == "broken":
        raise OSError("no such file")
      os.kill(os.getpid(), signal.SIGTERM)
    return load_batch(mesh, i)

  page["load_batch"] = load
  page["train"](page["FOLDER"], page["make_mesh"](2), 5000)
  print(f"ended after {len(loaded)} steps")


if __name__ == "__main__":
  main()
