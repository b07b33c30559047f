"""Continues the runs that ``test_contract`` saved; run by it in a process of its own."""

import pathlib
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp

from tests import problems
from tests import registry
from tests.test_contract import run


def main(folder: pathlib.Path) -> None:
  for index, row in enumerate(registry.ROWS):
    params = problems.params()
    like = jax.eval_shape(lambda params, row=row: (params, row.optimizer().init(params)), params)
    with ocp.StandardCheckpointer() as checkpointer:
      params, state = checkpointer.restore(folder / str(index), like)
    last = run(row, params, range(2, 4), state)
    leaves = [np.asarray(x) for x in jax.tree.leaves(last)]
    np.savez(folder / f"{index}.npz", *leaves)


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
