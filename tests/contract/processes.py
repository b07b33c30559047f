"""One of two processes, as on a pod: ``python -m tests.contract.processes PORT NUMBER [ROW ...]``.

Params and batches lie on the devices of both. Ends with an error where a registry's row trains to
other params than on one device, a file or subspace can't be read, or the processes decide
differently; and where one waits for the other, with the line at which it waits.
"""

import faulthandler
import functools
import pathlib
import sys
import tempfile
from typing import Any

from flax import nnx
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import optax

import optax_boost
import optax_boost.nnx

P = jax.sharding.PartitionSpec
# After so many seconds a check ends its process, which perhaps waits for the other.
LIMIT = 120
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


def check_held_arrays(number: int) -> None:
  """The first step works in its arrays' memory; a clone of one process alone outlives the steps."""
  model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
  nnx.update(model, sharded(jax.tree.map(np.asarray, nnx.state(model))))
  optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(lambda model, x: jnp.mean((model(x) - 1) ** 2))
  batch = place(BATCH[:, :8], P("x"))

  def memory() -> set[int]:
    arrays = [x for x in jax.tree.leaves(nnx.state((model, optimizer))) if x.size == 64]
    return {s.data.unsafe_buffer_pointer() for x in arrays for s in x.addressable_shards}

  before = memory()
  jax.block_until_ready(step(model, optimizer, batch))
  assert memory() == before
  held = nnx.clone(model).kernel[...] if number == 0 else None
  expected = None if held is None else [np.array(s.data) for s in held.addressable_shards]
  for _ in range(2):
    jax.block_until_ready(step(model, optimizer, batch))
  if held is not None:
    parts = [np.asarray(s.data) for s in held.addressable_shards]
    jax.tree.map(np.testing.assert_array_equal, parts, expected)


def check_opt_state_sharding(_: int) -> None:
  """The optimizer's state is spread over both processes, the params are whole in both."""
  shardings = {x.shape: x.sharding for x in jax.tree.leaves(sharded(PARAMS))}
  whole = place(np.ones(()), P()).sharding
  step = optax_boost.make_train_step(loss_fn, optax.adam(0.1))
  state = step.init(
    jax.tree.map(lambda x: place(x, P()), PARAMS),
    opt_state_sharding=lambda x: shardings.get(x.shape, whole),
  )
  alone = step.init(PARAMS)
  for _ in range(2):
    state, _ = jax.block_until_ready(step(state, place(BATCH, P("x"))))
    alone, _ = step(alone, BATCH)
  assert all(x.is_fully_replicated for x in jax.tree.leaves(state.params))
  assert not any(x.is_fully_replicated for x in jax.tree.leaves(state.opt_state) if x.ndim)
  check(state, alone)


def refusal(function: Any) -> str:
  """The ValueError of a call in this process, or ""; both processes must get the same."""
  try:
    function()
  except ValueError as error:
    text = str(error)
  else:
    text = ""
  mine = np.frombuffer(text.encode().ljust(2000), np.uint8)
  np.testing.assert_array_equal(*multihost_utils.process_allgather(mine))
  return text


def check_decisions(number: int) -> None:
  """Rows and losses of one process alone make both refuse, or none; a race is for one process."""
  classes = np.eye(8, 16, dtype=np.float32)
  on_one = np.where(np.arange(8)[:, None] < 4, 1.0, classes)
  cut = functools.partial(optax_boost.cut_sequences, length=4, full_length=16)
  assert not refusal(lambda: cut(place(on_one, P("x"))))
  assert "of classes" in refusal(lambda: cut(place(classes, P("x"))))
  assert not refusal(lambda: cut(classes if number else np.ones((8, 16), np.float32)))
  # The first process's batch makes the loss of windows infinite, the other's doesn't.
  batch = np.full((2, 64), 1.0 if number else np.inf, np.float32)
  boost = optax_boost.auto_boost("O1", total_steps=100, sequence_length=64)
  arguments = lambda w, x: jnp.mean(w * x), jnp.ones(()), batch
  assert "must be finite" in refusal(lambda: boost.optimizer(optax.sgd(0.1), *arguments))
  methods = {"sgd": optax.sgd(0.1), "adam": optax.adam(0.1)}
  assert "one process" in refusal(
    lambda: optax_boost.race(loss_fn, lambda key: PARAMS, BATCH, methods, steps=2, progress=False)
  )


def main() -> None:
  """Joins the other process and runs the rows."""
  port, number, *names = sys.argv[1:]
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(number))
  # It makes arrays as it is imported, for which JAX must know of all devices.
  from tests.contract import registry

  for check_both in (check_prices, check_held_arrays, check_opt_state_sharding, check_decisions):
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    check_both(int(number))
  faulthandler.dump_traceback_later(LIMIT, exit=True)
  with tempfile.TemporaryDirectory() as folder:
    check_files(pathlib.Path(folder))
  for row in registry.ROWS:
    # What the tests put around a step of the root hides it from the train step.
    if (not names or str(row) in names) and not (row.is_root and row.extra):
      faulthandler.dump_traceback_later(LIMIT, exit=True)
      print(row, flush=True)
      check_row(row)


if __name__ == "__main__":
  main()
