"""One of several processes, as on a pod; tests/contract/test_processes.py starts them::

  python -m tests.contract.processes FOLDER NAME ...

Params and batches lie on the devices of all processes. A name is of a check below or of a
registry's row. A process ends with an error if it trains to other params than one device alone,
if it can't read what all have saved, or if it decides otherwise than the others; and if it waits
for the others, with the line at which it waits.
"""

from collections.abc import Callable
import faulthandler
import functools
import pathlib
import sys
import time
from typing import Any

from flax import nnx
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import optax_boost
import optax_boost.nnx
from tests import compilations

P = jax.sharding.PartitionSpec
# After so many seconds a check ends its process, which perhaps waits for another.
LIMIT = 120
# Two and three processes of two devices each divide the last axes and the rows.
RNG = np.random.default_rng(0)
PARAMS = {
  "conv": {"kernel": RNG.normal(size=(4, 12, 12)).astype(np.float32)},
  "dense": {"kernel": RNG.normal(size=(24, 12)).astype(np.float32)},
  "norm": {"scale": RNG.normal(size=12).astype(np.float32)},
}
BATCH = RNG.normal(size=(12, 24)).astype(np.float32)


def one_axis() -> jax.sharding.Mesh:
  """All devices of all processes."""
  return jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def two_axes() -> jax.sharding.Mesh:
  """A process's devices along the second axis, the processes along the first."""
  sizes = jax.process_count(), jax.local_device_count()
  return jax.make_mesh(sizes, ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def place(x: np.ndarray, spec: P, mesh: jax.sharding.Mesh | None = None) -> jax.Array:
  """Each process has all of an array, and puts its part on its devices."""
  sharding = jax.NamedSharding(mesh or one_axis(), spec)
  return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def spec(x: Any, mesh: jax.sharding.Mesh) -> P:
  """Sharded along the last axes, as many as the mesh has."""
  names = mesh.axis_names[-x.ndim :] if x.ndim else ()
  return P(*[None] * (x.ndim - len(names)), *names)


def sharded(tree: Any, mesh: jax.sharding.Mesh | None = None) -> Any:
  """Sharded along the last axes."""
  mesh = mesh or one_axis()
  return jax.tree.map(lambda x: place(x, spec(x, mesh), mesh), tree)


def replicated(tree: Any) -> Any:
  """Whole on each device."""
  return jax.tree.map(lambda x: place(x, P()), tree)


def check(global_tree: Any, local_tree: Any) -> None:
  """Fails where arrays of all processes are not those of this one."""
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  jax.tree.map(close, multihost_utils.process_allgather(global_tree, tiled=True), local_tree)


GROUPS = ("conv", "dense|norm")


def loss_fn(params: Any, batch: Any) -> jax.Array:
  """Uses all leaves."""
  hidden = jnp.arcsinh(batch @ params["dense"]["kernel"]) * params["norm"]["scale"]
  return jnp.mean(hidden**2) + jnp.mean(jnp.einsum("ijk,bk->bij", params["conv"]["kernel"], hidden))


def train(step: Any, state: Any, batches: Any) -> Any:
  """The state after a step for each batch."""
  for batch in batches:
    # One at a time: so few threads can't wait for each other in two programs.
    state, _ = jax.block_until_ready(step(state, batch))
  return state


def compare_with_one_device(
  tx: optax.GradientTransformation,
  batches: Any = (BATCH,) * 3,
  params: Callable[[Any], Any] = sharded,
  mesh: jax.sharding.Mesh | None = None,
) -> Any:
  """The state after training on all devices, whose params must be those of one device alone."""
  step = optax_boost.make_train_step(loss_fn, tx)
  state = step.init(params(PARAMS))
  state = train(step, state, (place(x, P("x"), mesh) for x in batches))
  check(state.params, train(step, step.init(PARAMS), batches).params)
  return state


def check_row(row: Any) -> None:
  """Three steps of a row."""
  # Reduces over another axis, which the batch lies on here; examples/adasum_processes.py is its.
  compare_with_one_device(optax.sgd(0.1) if row.factory == "adasum" else row.optimizer())


def check_files(number: int, folder: pathlib.Path) -> None:
  """A subspace and permuted params that each process has a copy of, and reads for its devices."""
  folder = folder / str(number)
  folder.mkdir()
  kernel = np.linspace(0, 1, 192, dtype=np.float32).reshape(16, 12)
  copies, parts = {"kernel": place(kernel, P())}, sharded({"kernel": kernel})
  rows = np.linalg.qr(RNG.normal(size=(192, 3)))[0].T.reshape(3, 16, 12).astype(np.float32)
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


def check_prices(number: int, _: pathlib.Path) -> None:
  """All processes get the prices of the first, though their clocks differ."""
  step = optax_boost.make_train_step(lambda w, x: jnp.mean((w * x) ** 2), optax.sgd(0.1))
  state = step.init(place(np.float32(1.0), P()))
  ticks = np.cumsum(np.random.default_rng(number).uniform(0.1, 1, 100)).tolist()
  prices = optax_boost.length_prices(
    step.on_copy(state),
    place(BATCH[:, :16], P("x")),
    optax_boost.sequence_length_warmup(16, 100),
    clock=functools.partial(next, iter(ticks)),
  )
  first, *others = multihost_utils.process_allgather(np.array(list(prices.values())))
  for other in others:
    np.testing.assert_array_equal(first, other)
  assert len(set(first.tolist())) == 4


def check_held_arrays(number: int, _: pathlib.Path) -> None:
  """The first step works in its arrays' memory; a clone of one process alone outlives the steps."""
  model = nnx.Linear(12, 12, rngs=nnx.Rngs(0))
  nnx.update(model, sharded(jax.tree.map(np.asarray, nnx.state(model))))
  optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(lambda model, x: jnp.mean((model(x) - 1) ** 2))
  batch = place(BATCH[:, :12], P("x"))

  def memory() -> set[int]:
    arrays = [x for x in jax.tree.leaves(nnx.state((model, optimizer))) if x.size == 144]
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


def check_opt_state_sharding(*_: Any) -> None:
  """The optimizer's state is spread over all processes, the params are whole in each."""
  shardings = {x.shape: x.sharding for x in jax.tree.leaves(sharded(PARAMS))}
  whole = place(np.ones(()), P()).sharding
  step = optax_boost.make_train_step(loss_fn, optax.adam(0.1))
  state = step.init(replicated(PARAMS), opt_state_sharding=lambda x: shardings.get(x.shape, whole))
  state = train(step, state, [place(BATCH, P("x"))] * 2)
  assert all(x.is_fully_replicated for x in jax.tree.leaves(state.params))
  assert not any(x.is_fully_replicated for x in jax.tree.leaves(state.opt_state) if x.ndim)
  check(state, train(step, step.init(PARAMS), [BATCH] * 2))


def check_two_axes(*_: Any) -> None:
  """Params, masters, moments, gradients and averages are sharded along both axes of a mesh."""
  mesh, tx = two_axes(), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
  tx = optax_boost.skip_spikes(optax_boost.accumulate(tx, 2))
  tx = optax_boost.master_weights(optax_boost.dynamic_loss_scale(tx))
  tx = optax_boost.average_params(optax_boost.layerwise_decay(tx, GROUPS, 0.5), decay=0.9)
  state = compare_with_one_device(
    tx, [BATCH, BATCH + 1] * 2, functools.partial(sharded, mesh=mesh), mesh
  )
  shapes = {x.shape for x in jax.tree.leaves(PARAMS)}
  arrays = [(path, x) for path, x in jax.tree.leaves_with_path(state) if x.shape in shapes]
  # Params, masters, two moments, the window's sum and the average.
  assert len(arrays) == 6 * len(shapes)
  for path, x in arrays:
    assert x.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec(x, mesh)), x.ndim), path


def check_bad_rows(number: int, _: pathlib.Path) -> None:
  """Rows of one process alone, with a NaN and a spike, make all leave out the same batches."""
  rows = slice(0, len(BATCH) // jax.process_count())
  bad, long = BATCH.copy(), BATCH.copy()
  bad[rows], long[rows] = np.nan, 1e12
  tx = optax_boost.skip_spikes(optax_boost.accumulate(optax.adam(0.1), 2), start=2)
  tx = optax_boost.dynamic_loss_scale(tx, initial_scale=8.0)
  batches = [BATCH, BATCH, bad, BATCH, long, BATCH]
  state = compare_with_one_device(tx, batches, replicated)
  assert int(state.opt_state.spikes.spike_count) == 1
  assert float(state.opt_state.loss_scale) == 4.0
  mine = [np.asarray(x.addressable_shards[0].data) for x in jax.tree.leaves(state)]
  for parts in multihost_utils.process_allgather(mine):
    assert len({part.tobytes() for part in parts}) == 1


def check_compile_ahead(*_: Any) -> None:
  """A step on global arrays calls the program that was compiled ahead, in each process."""
  step = optax_boost.make_train_step(loss_fn, optax_boost.accumulate(optax.adam(0.1), 2))
  batches = [BATCH, np.concatenate([BATCH, -BATCH])]
  state, placed = step.init(sharded(PARAMS)), [place(x, P("x")) for x in batches]
  step.compile_ahead(state, placed).result()
  state, compiled = compilations.counted(lambda: train(step, state, placed))
  assert compiled == 0
  check(state.params, train(step, step.init(PARAMS), batches).params)


def check_thaw(*_: Any) -> None:
  """All processes change to the program of the next depth at the same step."""
  schedule = optax_boost.gradual_unfreezing(2, every=2)
  for steps, moves in ((2, False), (4, True)):
    tx = optax_boost.freeze_layers(optax.adam(0.1), GROUPS, schedule)
    state = compare_with_one_device(tx, [BATCH] * steps)
    kernels = state.params["conv"]["kernel"], sharded(PARAMS)["conv"]["kernel"]
    assert (
      any(
        np.any(new.data != old.data)
        for new, old in zip(*(x.addressable_shards for x in kernels), strict=True)
      )
      == moves
    )


def check_search_on_host(*_: Any) -> None:
  """SGPerm searches on the host, with params whole on each device and spread over all."""
  tx = optax_boost.sgperm(0.5, 1.0, lamda_max=1.0, partition_size_min=4, backend="host", key=1)
  for params in (replicated, sharded):
    state = compare_with_one_device(tx, params=params)
    moved = state.params["dense"]["kernel"].addressable_shards[0].data
    assert np.any(moved != params(PARAMS)["dense"]["kernel"].addressable_shards[0].data)


def check_axis_name(*_: Any) -> None:
  """LARS inside of `shard_map` sums norms over the parts of a layer that processes hold."""
  tx = optax_boost.lars(0.1, trust_coefficient=0.02, momentum=0.5, axis_name="x")

  def steps(grads: Any, params: Any) -> Any:
    state = tx.init(params)
    for _ in range(2):
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
    return params

  grads, specs = jax.tree.map(np.sin, PARAMS), jax.tree.map(lambda x: spec(x, one_axis()), PARAMS)
  mapped = jax.shard_map(steps, mesh=one_axis(), in_specs=(specs, specs), out_specs=specs)
  alone = jax.vmap(steps, in_axes=None, out_axes=None, axis_name="x", axis_size=1)
  check(jax.jit(mapped)(sharded(grads), sharded(PARAMS)), jax.jit(alone)(grads, PARAMS))


# Saved after the first of three micro-batches of the second step; the first layers thaw before the
# third.
SAVED, STEPS = 4, 9


def checkpointed_step() -> optax_boost.TrainStep:
  """Windows of three micro-batches, and two steps with frozen layers."""
  tx = optax_boost.accumulate(optax.adam(0.1), 3)
  schedule = optax_boost.gradual_unfreezing(2, every=2)
  return optax_boost.make_train_step(loss_fn, optax_boost.freeze_layers(tx, GROUPS, schedule))


def batch_at(step: int) -> np.ndarray:
  """The batch of a step."""
  return BATCH + np.float32(np.sin(step))


def trained_alone() -> Any:
  """The params that one device has after all steps, with no checkpoint."""
  step = checkpointed_step()
  return train(step, step.init(PARAMS), map(batch_at, range(STEPS))).params


def resume(folder: pathlib.Path, mesh: jax.sharding.Mesh) -> Any:
  """The params after the remaining steps, from a checkpoint that is restored onto a mesh."""
  step = checkpointed_step()

  def abstract(x: np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec(x, mesh)))

  with ocp.StandardCheckpointer() as checkpointer:
    like = step.init(jax.tree.map(abstract, PARAMS))
    state = checkpointer.restore(folder / "checkpoint", like)
  batches = (place(batch_at(i), P("x"), mesh) for i in range(SAVED, STEPS))
  return train(step, state, batches).params


def check_checkpoint(_: int, folder: pathlib.Path) -> None:
  """A checkpoint of all processes, in a window with frozen layers, resumes on two meshes."""
  step = checkpointed_step()
  batches = (place(batch_at(i), P("x")) for i in range(SAVED))
  state = train(step, step.init(sharded(PARAMS)), batches)
  assert int(state.opt_state.accumulation.count) == 1
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "checkpoint", state)
  expected = trained_alone()
  for mesh in (one_axis(), two_axes()):
    check(resume(folder, mesh), expected)


class Network(nnx.Module):
  """Has statistics, and keys of random numbers."""

  def __init__(self) -> None:
    rngs = nnx.Rngs(0)
    self.dense = nnx.Linear(24, 12, rngs=rngs)
    self.norm, self.dropout = nnx.BatchNorm(12, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Applies the layers."""
    return self.dropout(self.norm(self.dense(x)))


def check_nnx_checkpoint(_: int, folder: pathlib.Path) -> None:
  """A model and an optimizer whose counts lie on no mesh resume from all processes' checkpoint."""
  step = optax_boost.nnx.make_train_step(lambda model, x: jnp.mean((model(x) - 1) ** 2))
  tx = optax_boost.accumulate(optax.adam(0.1), 2)

  def trained(steps: range, start: Any = None) -> Any:
    model = Network()
    params = nnx.state(model, nnx.Param)
    nnx.update(model, sharded(jax.tree.map(np.asarray, params)))
    modules = model, nnx.Optimizer(model, tx, wrt=nnx.Param)
    if start is not None:
      with ocp.StandardCheckpointer() as checkpointer:
        nnx.update(modules, checkpointer.restore(start, nnx.state(modules)))
    for i in steps:
      jax.block_until_ready(step(*modules, place(batch_at(i), P("x"))))
    return nnx.state(modules)

  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "nnx", trained(range(3)))
  pairs = [jax.tree.leaves(x) for x in (trained(range(5)), trained(range(3, 5), folder / "nnx"))]
  for whole, resumed in zip(*pairs, strict=True):
    for x, y in zip(whole.addressable_shards, resumed.addressable_shards, strict=True):
      assert jnp.all(x.data == y.data)


def refusal(function: Any) -> str:
  """The ValueError of a call in this process, or ""; all processes must get the same."""
  try:
    function()
  except ValueError as error:
    text = str(error)
  else:
    text = ""
  mine = np.frombuffer(text.encode().ljust(2000), np.uint8)
  for other in multihost_utils.process_allgather(mine):
    np.testing.assert_array_equal(mine, other)
  return text


def check_decisions(number: int, _: pathlib.Path) -> None:
  """Rows and losses of one process alone make all refuse, or none; a race is for one process."""
  classes = np.eye(12, 16, dtype=np.float32)
  on_one = np.where(np.arange(12)[:, None] < 4, 1.0, classes)
  cut = functools.partial(optax_boost.cut_sequences, length=4, full_length=16)
  assert not refusal(lambda: cut(place(on_one, P("x"))))
  assert "of classes" in refusal(lambda: cut(place(classes, P("x"))))
  assert not refusal(lambda: cut(classes if number else np.ones((12, 16), np.float32)))
  # The first process's batch makes the loss of windows infinite, the others' don't.
  batch = np.full((2, 64), 1.0 if number else np.inf, np.float32)
  boost = optax_boost.auto_boost("O1", total_steps=100, sequence_length=64)
  arguments = lambda w, x: jnp.mean(w * x), jnp.ones(()), batch
  assert "must be finite" in refusal(lambda: boost.optimizer(optax.sgd(0.1), *arguments))
  methods = {"sgd": optax.sgd(0.1), "adam": optax.adam(0.1)}
  assert "one process" in refusal(
    lambda: optax_boost.race(loss_fn, lambda key: PARAMS, BATCH, methods, steps=2, progress=False)
  )


CHECKS = {
  name.removeprefix("check_"): check_all
  for name, check_all in list(globals().items())
  if name.startswith("check_") and name != "check_row"
}


def main() -> None:
  """Joins the other processes and runs the checks and rows with these names."""
  folder, *names = sys.argv[1:]
  jax.distributed.initialize()
  # It makes arrays as it is imported, for which JAX must know of all devices.
  from tests.contract import registry

  rows = {str(row): row for row in registry.ROWS}
  for name in names:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    start = time.perf_counter()
    if name in CHECKS:
      CHECKS[name](jax.process_index(), pathlib.Path(folder))
    else:
      check_row(rows[name])
    print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
  main()
