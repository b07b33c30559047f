"""One of two processes, as on a pod: ``python -m tests.contract.processes PORT NUMBER [ROW ...]``.

Params and batches lie on the devices of both. Ends with an error where a registry's row trains to
other params than on one device, or a file or subspace can't be read.
"""

import functools
import pathlib
import sys
import tempfile
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import optax

import optax_boost

P = jax.sharding.PartitionSpec
RNG = np.random.default_rng(0)
PARAMS = {
  "conv": {"kernel": RNG.normal(size=(4, 8, 8)).astype(np.float32)},
  "dense": {"kernel": RNG.normal(size=(16, 8)).astype(np.float32)},
  "norm": {"scale": RNG.normal(size=8).astype(np.float32)},
}
BATCH = RNG.normal(size=(8, 16)).astype(np.float32)


def place(x: np.ndarray, spec: P) -> jax.Array:
  """Each process has all of an array, and puts its part on its devices."""
  mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  sharding = jax.NamedSharding(mesh, spec)
  return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def sharded(tree: Any) -> Any:
  """Sharded along the last axis."""
  return jax.tree.map(lambda x: place(x, P(*[None] * (x.ndim - 1), "x")), tree)


def check(global_tree: Any, local_tree: Any) -> None:
  """Fails where arrays of both processes are not those of this one."""
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  jax.tree.map(close, multihost_utils.process_allgather(global_tree, tiled=True), local_tree)


def loss_fn(params: Any, batch: Any) -> jax.Array:
  """Uses all leaves."""
  hidden = jnp.tanh(batch @ params["dense"]["kernel"]) * params["norm"]["scale"]
  return jnp.mean(hidden**2) + jnp.mean(jnp.einsum("ijk,bk->bij", params["conv"]["kernel"], hidden))


def check_row(row: Any) -> None:
  """Three steps of a row."""
  # Reduces over another axis, which the batch lies on here; examples/adasum_processes.py is its.
  tx = optax.sgd(0.1) if row.factory == "adasum" else row.optimizer()
  trained = []
  for params, batch in (
    (sharded(PARAMS), place(BATCH, P("x"))),
    (jax.tree.map(jnp.asarray, PARAMS), jnp.asarray(BATCH)),
  ):
    step = optax_boost.make_train_step(loss_fn, tx)
    state = step.init(params)
    for _ in range(3):
      # One at a time: so few threads can't wait for each other in two programs.
      state, _ = jax.block_until_ready(step(state, batch))
    trained.append(state.params)
  check(*trained)


def check_files(folder: pathlib.Path) -> None:
  """A subspace and permuted params that each process has a copy of, and reads for its devices."""
  kernel = np.linspace(0, 1, 128, dtype=np.float32).reshape(16, 8)
  copies, parts = {"kernel": place(kernel, P())}, sharded({"kernel": kernel})
  rows = np.linalg.qr(RNG.normal(size=(128, 3)))[0].T.reshape(3, 16, 8).astype(np.float32)
  basis, variance = {"kernel": place(rows, P())}, np.ones(3, np.float32)
  subspace = optax_boost.Subspace(copies, basis, variance, variance / 3)
  subspace.save(folder / "subspace.npz")
  loaded = optax_boost.Subspace.load(folder / "subspace.npz", parts)
  check(loaded.basis, {"kernel": rows})
  tx = optax_boost.sgperm(1.0, 1.0, lamda_max=1.0, method="rank")
  state = tx.init(copies)
  _, state = jax.jit(tx.update)(jax.tree.map(lambda x: 10 * x, copies), state, copies)
  model = optax_boost.permuted_params(state)
  model.save(folder / "permuted.npz")
  loaded = optax_boost.PermutedParams.load(folder / "permuted.npz", parts).params
  assert np.any(
    loaded["kernel"].addressable_shards[0].data != parts["kernel"].addressable_shards[0].data
  )
  check(loaded, jax.tree.map(np.asarray, model.params))


def check_prices(number: int) -> None:
  """Both processes get the prices of the first, though their clocks differ."""
  step = optax_boost.make_train_step(lambda w, x: jnp.mean((w * x) ** 2), optax.sgd(0.1))
  state = step.init(place(np.float32(1.0), P()))
  ticks = np.cumsum(np.random.default_rng(number).uniform(0.1, 1, 100)).tolist()
  prices = optax_boost.length_prices(
    step.on_copy(state),
    place(BATCH, P("x")),
    optax_boost.sequence_length_warmup(16, 100),
    clock=functools.partial(next, iter(ticks)),
  )
  first, second = multihost_utils.process_allgather(np.array(list(prices.values())))
  np.testing.assert_array_equal(first, second)
  assert len(set(first.tolist())) == 4


def main() -> None:
  """Joins the other process and runs the rows."""
  port, number, *names = sys.argv[1:]
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(number))
  # It makes arrays as it is imported, for which JAX must know of all devices.
  from tests.contract import registry

  check_prices(int(number))
  with tempfile.TemporaryDirectory() as folder:
    check_files(pathlib.Path(folder))
  for row in registry.ROWS:
    if not names or str(row) in names:
      print(row, flush=True)
      check_row(row)


if __name__ == "__main__":
  main()
