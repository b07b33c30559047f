"""The contract's columns *hostile programs* and *inner optimizers*: inputs of real programs.

Each row of the registry runs through the train step with every extra argument that it passes.
"""

import dataclasses
import functools
import re
import threading
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost._form import _protocol
from optax_boost._foundation import _masks
from tests import compilations, meshes, problems
from tests.contract import registry, test_contract

# One row for each factory: its options make no difference to such params.
ROWS = list({row.factory: row for row in registry.ROWS}.values())
every_row = pytest.mark.parametrize("row", ROWS, ids=str)
STEPS = 4

# The problem's leaves under names of state fields. Sorted as before, and groups by layer still fit.
HOSTILE = {
  "conv": {"kernel": "curvature"},
  "dense": {"kernel": "loss_scale", "bias": "frozen_groups"},
  "norm": {"scale": "notfinite_count"},
}

# These train in scans, where the depth of freezing is traced.
pytestmark = pytest.mark.filterwarnings("ignore:`freeze_layers` saves no time")


def distance(params: Any, batch: Any) -> jax.Array:
  return problems.distance(params, problems.target(params)) + 0 * batch


def train_step(tx: optax.GradientTransformation, **options: Any) -> optax_boost.TrainStep:
  """A step whose mean gradient over all of the data, if asked for, is that of its one batch."""
  state = jax.eval_shape(tx.init, problems.params())
  if _protocol.is_requested(state, _protocol.FULL_GRADIENT):
    options["full_grad_fn"] = lambda grad_fn, params: grad_fn(params, 0.0)
  return optax_boost.make_train_step(distance, tx, **options)


def train(step: optax_boost.TrainStep, params: Any, steps: int = STEPS) -> Any:
  state = step.init(params)
  for _ in range(steps):
    state, metrics = step(state, 0.0)
  return state, metrics


@functools.cache
def trained(row: registry.Row, scale: float = 1.0) -> Any:
  """The row's training from the scaled params, shared by the columns."""
  return train(shared_step(row), jax.tree.map(lambda x: scale * x, problems.params()))


@functools.cache
def shared_step(row: registry.Row) -> optax_boost.TrainStep:
  return train_step(row.optimizer())


def program(step: optax_boost.TrainStep, state: Any) -> str:
  """What a step computes and reports, without the names of the state's arrays."""
  text = step.lower(state, 0.0).as_text()
  return re.sub(r'jax.result_info = "result\[0\][^"]*"', "", text)


@every_row
def test_params_named_like_state_fields_train_as_any_others(row):
  params = problems.params()
  renamed = {
    layer: {HOSTILE[layer][name]: leaf for name, leaf in leaves.items()}
    for layer, leaves in params.items()
  }
  step = shared_step(row)
  assert program(step, step.init(renamed)) == program(step, step.init(params))


@every_row
@pytest.mark.parametrize(
  ("params_dtype", "grads_dtype"), [("float32", "bfloat16"), ("float16", "float32")]
)
def test_gradients_of_another_dtype_than_the_params_train(row, params_dtype, grads_dtype):
  tx, params = row.optimizer(), problems.params(params_dtype)

  @jax.jit
  def step(params: Any, state: Any, t: jax.Array) -> Any:
    grads = jax.tree.map(lambda g: g.astype(grads_dtype), problems.grads(params, t))
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, updates

  moved, state = params, tx.init(params)
  for t in range(STEPS):
    moved, state, updates = step(moved, state, t)
  assert problems.spec(moved) == problems.spec(params)
  assert problems.spec(state) == problems.spec(tx.init(params))
  chex.assert_tree_all_finite((moved, updates))
  expected, _ = test_contract.run(row, problems.params(), range(STEPS))
  # Half of the time the direction counts only: the gradients' rounding decides permutations.
  gap = optax.tree.norm(jax.tree.map(lambda x, y: x - y.astype("float32"), expected, moved))
  assert gap < 0.1 * optax.tree.norm(expected) or row.gathers


LABELS = {
  "conv": {"kernel": "ours"},
  "dense": {"kernel": "ours", "bias": "other"},
  "norm": {"scale": "other"},
}


@every_row
@pytest.mark.filterwarnings("ignore::optax_boost.NoEffectWarning")
def test_inside_partition_with_all_extra_arguments(row):
  """`optax.partition` masks with `optax.masked`, so this is both."""
  params = problems.params()
  tx = optax.partition({"ours": row.optimizer(), "other": optax.sgd(0.1)}, LABELS)
  if row.is_root:
    with pytest.raises(ValueError, match=rf"`{row.factory}` must be around the whole|last group"):
      train(train_step(tx), params)
  else:
    state, _ = train(train_step(tx), params)
    kernels = {layer: {"kernel": params[layer]["kernel"]} for layer in ("conv", "dense")}
    alone, _ = train(train_step(row.optimizer()), kernels)
    for layer, leaves in alone.params.items():
      np.testing.assert_allclose(
        state.params[layer]["kernel"], leaves["kernel"], rtol=1e-4, atol=1e-5
      )
    goal = problems.target(params)["norm"]["scale"]
    scale = params["norm"]["scale"]
    np.testing.assert_allclose(
      state.params["norm"]["scale"], goal + 0.9**STEPS * (scale - goal), rtol=1e-5
    )


# One row for each kind of step: by layers, with closures, with sorts, and by wrappers that select,
# average, freeze or switch. Traced, with the mesh set, all rows run in test_contract.py.
ON_EXPLICIT_AXES = ("accumulate", "average_params", "dim_reduce", "freeze_layers", "lars", "sgperm")


@pytest.mark.parametrize("row", [row for row in ROWS if row.factory in ON_EXPLICIT_AXES], ids=str)
def test_params_on_a_mesh_with_explicit_axes_eagerly_and_no_mesh_set(row):
  if row.factory == "sgperm" and not hasattr(jax.lax, "pcast"):
    pytest.skip("gathers there, unless jitted, need a newer JAX")
  params, tx = problems.params(), row.make()
  grads = problems.grads(params)
  expected = test_contract.jitted_update(row)(grads, tx.init(params), params)
  sharded, grads = problems.sharded((params, grads), problems.mesh("Explicit"))
  updates, state = tx.update(grads, tx.init(sharded), sharded)
  chex.assert_trees_all_close(
    jax.device_get((updates, state)), jax.device_get(expected), rtol=1e-5, atol=1e-6
  )
  for update_leaf, param in zip(jax.tree.leaves(updates), jax.tree.leaves(sharded), strict=True):
    assert update_leaf.sharding.is_equivalent_to(param.sharding, param.ndim)


def loss_of_examples(params: Any, examples: jax.Array) -> jax.Array:
  """A mean over examples, to which every entry of any params belongs."""
  products = [jnp.multiply.outer(examples, x) for x in jax.tree.leaves(params)]
  return sum(jnp.mean((x - 0.3) ** 2) for x in products)


EXAMPLES = np.linspace(-2, 1, 16, dtype=np.float32)
P = jax.sharding.PartitionSpec
# The others take a minute; other columns trace their updates in both modes.
OFTEN = ("accumulate", "freeze_layers", "lars")
rows_in_train_steps = pytest.mark.parametrize(
  "row",
  [
    pytest.param(row, id=str(row), marks=() if str(row) in OFTEN else pytest.mark.slow)
    for row in registry.ROWS
  ],
)


def step_of_examples(row: registry.Row, loss: Any, examples: Any) -> optax_boost.TrainStep:
  """The row's train step; SVRG's full gradient is over all examples."""
  tx, options = row.optimizer(), {}
  if _protocol.is_requested(jax.eval_shape(tx.init, row.params()), _protocol.FULL_GRADIENT):
    options["full_grad_fn"] = lambda grad_fn, params: grad_fn(params, examples)
  return optax_boost.make_train_step(loss, tx, donate=False, **options)


@functools.cache
def trained_on_one_device(row: registry.Row) -> Any:
  step = step_of_examples(row, loss_of_examples, EXAMPLES)
  state = step.init(row.params())
  for _ in range(STEPS):
    state, metrics = step(state, EXAMPLES)
  return state, metrics["loss"]


def assert_trained_as_on_one_device(row: registry.Row, trained: Any) -> None:
  # The state has inverses of curvatures.
  chex.assert_trees_all_close(
    jax.device_get(trained), jax.device_get(trained_on_one_device(row)), rtol=1e-3, atol=1e-4
  )


@rows_in_train_steps
def test_a_train_step_on_explicit_axes_trains_as_on_one_device(row):
  mesh = problems.mesh("Explicit")

  def loss(params: Any, examples: jax.Array) -> jax.Array:
    whole = jax.tree.map(lambda x: jax.sharding.reshard(x, P(*[None] * x.ndim)), params)
    return loss_of_examples(whole, examples)

  with jax.set_mesh(mesh):
    examples = jax.device_put(EXAMPLES, jax.NamedSharding(mesh, P("x")))
    step = step_of_examples(row, loss, examples)
    params = problems.sharded(row.params(), mesh)
    state = step.init(params)
    for _ in range(STEPS):
      state, metrics = jax.block_until_ready(step(state, examples))
  assert_trained_as_on_one_device(row, (state, metrics["loss"]))
  jax.tree.map(lambda x, y: chex.assert_equal(x.sharding, y.sharding), state.params, params)


@rows_in_train_steps
def test_a_train_step_in_a_shard_map_that_checks_what_varies_trains_as_on_one_device(row):
  mesh = problems.mesh("Auto")
  loss = lambda params, examples: jax.lax.pmean(loss_of_examples(params, examples), "x")  # noqa: E731
  step = step_of_examples(row, loss, EXAMPLES)
  mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("x")), out_specs=P()))
  state = step.init(row.params())
  for _ in range(STEPS):
    state, metrics = jax.block_until_ready(mapped(state, EXAMPLES))
  assert_trained_as_on_one_device(row, (state, metrics["loss"]))


# The train step holds what threads share; methods are pure functions.
@pytest.mark.parametrize(
  "row", [row for row in ROWS if row.factory in ("dim_reduce", "freeze_layers", "sgperm")], ids=str
)
def test_two_threads_share_one_train_step(row):
  scales = (1.0, 0.5)
  expected = [trained(row, scale)[0] for scale in scales]
  step = train_step(row.optimizer())
  finished: dict[float, Any] = {}

  def work(scale: float) -> None:
    finished[scale] = train(step, jax.tree.map(lambda x: scale * x, problems.params()))[0]

  threads = [threading.Thread(target=work, args=(scale,)) for scale in scales]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  chex.assert_trees_all_equal([finished[scale] for scale in scales], expected)


@every_row
@pytest.mark.filterwarnings("ignore::optax_boost.NoEffectWarning")
def test_complex_leaves_are_trained_or_refused_by_name(row):
  params = {"dense": {"kernel": jnp.full((4, 2), 1 + 1j), "bias": jnp.ones(2, jnp.complex64)}}
  if not row.allows_complex:
    tx = dataclasses.replace(row, extra=None).make()
    with pytest.raises(TypeError, match=r"'dense/bias' is complex64.*optax.masked"):
      tx.init(params)
  else:
    tx = row.make()
    state = tx.init(params)
    for _ in range(3):
      updates, state = jax.jit(tx.update)(params, state, params)
    chex.assert_tree_all_finite(updates)
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype("complex64")}


def in_host_memory(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """Keeps a state in the host's memory between steps, as docs/devices.md shows."""
  inner = optax.with_extra_args_support(inner)

  def move(state: Any, space: jax.memory.Space) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, space), state)

  def init(params: Any) -> Any:
    return move(inner.init(params), jax.memory.Space.Host)

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    state = move(state, jax.memory.Space.Device)
    updates, state = inner.update(updates, state, params, **extra)
    return updates, move(state, jax.memory.Space.Host)

  return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.parametrize("row", test_contract.LAYERWISE, ids=str)
def test_a_jitted_init_changes_nothing(row):
  """Nor does it hide what a method says in it, of which JAX remembers but the program."""
  tx, step = row.optimizer(), shared_step(row)
  jitted = train_step(tx._replace(init=jax.jit(tx.init)))
  states = [one.init(problems.params()) for one in (jitted, step)]
  chex.assert_trees_all_close(*states, rtol=1e-6)
  assert program(jitted, states[0]) == program(step, states[1])


def memory_spaces(tx: optax.GradientTransformation) -> set[jax.memory.Space]:
  """Where the arrays of the optimizer state lie after a step from its init; traced alone."""
  step = train_step(tx)

  def one_step(params: Any) -> Any:
    return step(step.init(params), 0.0)[0].opt_state

  return {aval.memory_space for aval in jax.make_jaxpr(one_step)(problems.params()).out_avals}


@every_row
def test_a_state_may_be_kept_in_host_memory(row):
  if row.is_root:
    inner = around(row, in_host_memory(optax.adam(0.05)))
    if row.factory == "freeze_layers":
      # The state of the user's wrapper is none of optax's.
      inner["counts"] = "group"
    tx = row.feed(getattr(optax_boost, row.factory)(**inner))
    assert jax.memory.Space.Host in memory_spaces(tx)
  else:
    assert memory_spaces(in_host_memory(row.optimizer())) <= {jax.memory.Space.Host}


@pytest.mark.parametrize("spec", [None, (), ("x",)], ids=["one device", "replicated", "sharded"])
def test_a_state_in_host_memory_remains_in_host_memory(spec):
  host = jax.device_put(jnp.ones(1), jax.memory.Space.Host).sharding.memory_kind
  if host == jax.devices()[0].default_memory().kind:
    pytest.skip("older JAX has one memory on a CPU")
  params = {"kernel": jnp.ones((4, 2))}
  if spec is not None:
    mesh = meshes.mesh((2,), ("x",))
    params = jax.device_put(params, jax.NamedSharding(mesh, jax.P(*spec)))
  finals = []
  for tx in (optax.adam(0.1), in_host_memory(optax.adam(0.1))):
    step = compilations.Watched(train_step(optax_boost.dynamic_loss_scale(tx)))
    state, _ = train(step, params)
    assert step.compiled_once()
    finals.append(state)
  chex.assert_trees_all_close(finals[0].params, finals[1].params, rtol=1e-6)
  kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(finals[1].opt_state.inner_state)}
  assert kinds == {host}


# One kind for either dtype: with counts and two moments, and with norms and a momentum.
INNER_OF = {"bfloat16": "adam", "float16": "lars"}
INNER = {
  "adam": lambda: optax.adam(0.05, eps=1e-4),
  "lars": lambda: optax_boost.lars(0.1, trust_coefficient=0.1, momentum=0.5, exclude=None),
}


def around(row: registry.Row, inner: optax.GradientTransformation) -> dict[str, Any]:
  """The row's arguments with another optimizer inside."""
  places = [name for name in ("inner", "first", "second") if name in row.kwargs]
  return row.kwargs | dict.fromkeys(places, inner)


@every_row
def test_inside_shard_map_each_device_may_have_its_own_state(row):
  """Local SGD, around an optimizer whose state has counters and moments."""
  if row.factory == "adasum" and jax.__version_info__ >= (0, 11):
    pytest.skip("newer JAX nests no shard_map over one axis, which this row's feed would do")
  tx = row.feed(getattr(optax_boost, row.factory)(**around(row, INNER["adam"]())))
  mesh = meshes.mesh((2,), ("x",))

  def step(params: Any, state: Any) -> Any:
    params, state = jax.tree.map(lambda x: x[0], (params, state))
    updates, state = tx.update(problems.grads(params), state, params)
    return jax.tree.map(lambda x: x[None], (optax.apply_updates(params, updates), state))

  split = jax.sharding.PartitionSpec("x")
  local = jax.shard_map(step, mesh=mesh, in_specs=split, out_specs=split)
  one = jax.eval_shape(lambda: (problems.params(), tx.init(problems.params())))
  both = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), one)
  assert problems.spec(jax.eval_shape(local, *both)) == problems.spec(both)


WRAPPERS = [row for row in ROWS if {"inner", "first"} & row.kwargs.keys()]


@pytest.mark.parametrize("row", WRAPPERS, ids=str)
@pytest.mark.parametrize("dtype", INNER_OF)
def test_wrappers_train_around_every_kind_of_optimizer(row, dtype):
  rng = np.random.default_rng(0)
  start = {
    "conv": jnp.asarray(rng.normal(size=(4, 3)), dtype),
    "dense": jnp.asarray(rng.normal(size=3), dtype),
  }
  steps = 24

  def loss(params: Any, batch: jax.Array) -> jax.Array:
    h = jnp.tanh(batch @ params["conv"]) * params["dense"]
    return jnp.mean((h.astype(jnp.float32) - 0.3) ** 2)

  batch = jnp.asarray(rng.normal(size=(8, 4)), dtype)
  tx = row.feed(getattr(optax_boost, row.factory)(**around(row, INNER[INNER_OF[dtype]]())))
  step = optax_boost.make_train_step(loss, tx, donate=False)

  @jax.jit
  def run(start: Any) -> Any:
    state = step.init(start)
    after, metrics = jax.lax.scan(lambda s, _: step(s, batch), state, length=steps)
    return state, after, metrics["loss"]

  before, after, losses = run(start)
  assert problems.spec(after) == problems.spec(before)
  chex.assert_tree_all_finite(after.params)
  # LaPerm's projections, every 20 steps, raise the loss for a while.
  assert np.min(losses) < 0.75 * losses[0], losses


def test_leaves_beside_a_hidden_module_must_be_given():
  hidden = {"net": optax.MaskedNode()}
  full = {"net": {"w": 1.0}, "net/linear": {"w": 2.0}}
  assert _masks.leaves_like(hidden, full) is None
  assert _masks.leaves_like(hidden, {"net": full["net"]}) == [optax.MaskedNode()]
