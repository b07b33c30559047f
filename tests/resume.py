"""Continues the runs that ``test_contract`` saved; run by it in a process of its own."""

import functools
import pathlib
import sys

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

from tests import problems
from tests import registry
from tests.test_contract import update


def main(folder: pathlib.Path) -> None:
  for index, row in enumerate(registry.ROWS):
    tx = row.optimizer()
    params = problems.params()
    like = (params, tx.init(params))
    with ocp.StandardCheckpointer() as checkpointer:
      params, state = checkpointer.restore(folder / str(index), like)
    for t in (2, 3):
      updates, state = jax.jit(functools.partial(update, tx))(params, state, t)
      params = optax.apply_updates(params, updates)
    leaves = [np.asarray(x) for x in jax.tree.leaves((params, state))]
    np.savez(folder / f"{index}.npz", *leaves)


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
