"""Continues the runs that ``test_contract`` saved; run by it in a process of its own."""

import pathlib
import sys
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from tests.contract import registry
from tests.contract.test_contract import run


def main(folder: pathlib.Path, *names: str) -> None:
  rows = [row for row in registry.ROWS if str(row) in names]

  def start(row: registry.Row) -> Any:
    params = row.params()
    return params, row.optimizer().init(params)

  like = jax.eval_shape(lambda: {str(row): start(row) for row in rows})
  with ocp.StandardCheckpointer() as checkpointer:
    halfway = checkpointer.restore(folder / "halfway", like)
  for row in rows:
    params, state = halfway[str(row)]
    last = run(row, params, range(3, 5), state)
    leaves = [np.asarray(x) for x in jax.tree.leaves(last)]
    np.savez(folder / f"{row}.npz", *leaves)


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
