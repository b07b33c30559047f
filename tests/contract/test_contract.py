"""What every transformation keeps to: each test is a column, run for every row of the registry.

Columns of what the rows of a factory share run for one row of each factory.
"""

import dataclasses
import functools
import inspect
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import chex
from flax import nnx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optax_boost
from tests import compilations, problems, products
from tests.contract import registry

every_row = pytest.mark.parametrize("row", registry.ROWS, ids=str)
# Wrappers of optax treat states of one class alike, so one row of each factory is enough, and one
# that calls the host.
OF_FACTORIES = list({(row.factory, row.calls_host): row for row in registry.ROWS}.values())
every_factory = pytest.mark.parametrize("row", OF_FACTORIES, ids=str)
# Further rows of a factory are among the slow tests.
factories_first = pytest.mark.parametrize(
  "row",
  [
    row if row in OF_FACTORIES else pytest.param(row, marks=pytest.mark.slow)
    for row in registry.ROWS
  ],
  ids=str,
)
DTYPES = ("float16", "bfloat16", "float32", "float64")


# Columns share a row's transformation and its compiled steps: a transformation is pure.
@functools.cache
def transformation(row: registry.Row) -> optax.GradientTransformationExtraArgs:
  return row.make()


@functools.cache
def jitted_update(row: registry.Row) -> Any:
  return jax.jit(transformation(row).update)


@functools.cache
def first_update(row: registry.Row) -> Any:
  """The updates of the first step, and the state after it."""
  params = row.params()
  return jitted_update(row)(problems.grads(params), transformation(row).init(params), params)


@functools.cache
def jitted_step(row: registry.Row) -> Any:
  """One step of the row as an optimizer: from params, state and step to params and state."""
  return jax.jit(functools.partial(step, row.optimizer()))


def step(tx: Any, params: Any, state: Any, t: Any) -> Any:
  updates, state = update(tx, params, state, t)
  return optax.apply_updates(params, updates), state


def run(row: registry.Row, params: Any, steps: range, state: Any = None) -> Any:
  """The loop that everything else is compared with."""
  state = row.optimizer().init(params) if state is None else state
  for t in steps:
    params, state = jitted_step(row)(params, state, t)
  return params, state


def program(function: Any, *args: Any) -> str:
  """What the function computes, without the addresses of Python's functions."""
  return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(function)(*args)))


def update(tx: Any, params: Any, state: Any, step: Any, **more: Any) -> Any:
  return tx.update(problems.grads(params, step), state, params, **more)


@every_row
def test_the_method_acts(row):
  if row.acts is not None:
    assert row.acts(row.make(), row.baseline())
  else:
    params = row.params()
    ours, _ = first_update(row)
    base = row.baseline()
    base, _ = jax.jit(base.update)(problems.grads(params), base.init(params), params)
    change = optax.tree.norm(optax.tree.sub(ours, base)) / optax.tree.norm(base)
    assert change > 1e-2


@every_row
def test_solves_its_problem(row):
  params = jax.tree.map(lambda x: 0.1 * x, row.reachable(row.params()))
  goal = row.reachable(problems.target(params))
  params = params if row.start is None else row.start(goal)
  tx = row.optimizer()

  @jax.jit
  def solve(params):
    def body(carry, _):
      params, state = carry
      updates, state = tx.update(jax.grad(problems.distance)(params, goal), state, params)
      return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(body, (params, tx.init(params)), length=row.steps)[0][0]

  assert problems.distance(solve(params), goal) < 1e-3 * problems.distance(params, goal)


@every_row
def test_takes_extra_arguments_it_does_not_know(row):
  params, tx = row.params(), transformation(row)
  arguments = problems.grads(params), tx.init(params), params
  more = functools.partial(tx.update, unheard_of=1)
  ours, expected = (program(update, *arguments) for update in (more, tx.update))
  assert ours == expected


@every_row
def test_no_product_has_the_default_precision(row):
  """On a GPU that would be TF32, and on a TPU bfloat16."""
  tx, params = transformation(row), row.params()
  found = products.precisions(
    lambda p, g: tx.update(g, tx.init(p), p), params, problems.grads(params)
  )
  assert set(found) <= {products.HIGHEST}
  assert found or row.factory != "dim_reduce"


@every_row
def test_says_that_it_needs_params(row):
  tx, params = transformation(row), row.params()
  state, grads = tx.init(params), problems.grads(params)
  if row.needs_params:
    with pytest.raises(ValueError, match=r"needs the current params; got params=None. Call"):
      tx.update(grads, state)
  else:
    _, after = jax.eval_shape(tx.update, grads, state)
    assert problems.spec(after) == problems.spec(state)


@factories_first
def test_donated_scans_of_a_population_equal_the_plain_loop(row):
  """Scans of two steps, to which the params and states of three members are donated."""
  tx = row.optimizer()
  members = [jax.tree.map(lambda x, s=s: s * x, row.params()) for s in (0.5, 1.0, 2.0)]
  population = jax.tree.map(lambda *xs: jnp.stack(xs), *members)

  def body(carry, t):
    return jax.vmap(lambda params, state: step(tx, params, state, t))(*carry), None

  @functools.partial(jax.jit, donate_argnums=0)
  def two_steps(carry, t):
    return jax.lax.scan(body, carry, t + np.arange(2))[0]

  carry = population, jax.jit(jax.vmap(tx.init))(population)
  for t in (0, 2):
    old, _ = carry
    carry = two_steps(carry, t)
    assert all(x.is_deleted() for x in jax.tree.leaves(old))
  found = jax.device_get(carry)
  for i, member in enumerate(members):
    one = jax.tree.map(lambda x, i=i: x[i], found)
    chex.assert_trees_all_close(one, run(row, member, range(4)), rtol=1e-5, atol=1e-6)


@every_factory
def test_derivatives_of_steps_are_finite(row):
  """As meta-learning takes them, with respect to initial params and to a learning rate."""
  tx, params = row.optimizer(), row.params()

  def distance_after_two_steps(params, rate):
    target, state = problems.target(params), tx.init(params)
    for t in range(2):
      grads = jax.tree.map(lambda g: rate * g, problems.grads(params, t))
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
    return problems.distance(params, target)

  derivatives = jax.jit(jax.grad(distance_after_two_steps, argnums=(0, 1)))
  # A norm of zero has no derivative.
  start_at_zero = params | {"conv": jax.tree.map(jnp.zeros_like, params["conv"])}
  for start in (params, start_at_zero, jax.tree.map(jnp.zeros_like, params)):
    chex.assert_tree_all_finite(derivatives(start, jnp.float32(1)))


@every_row
def test_compiles_once(row):
  params = row.params()
  state = transformation(row).init(params)
  for t in range(3):
    arguments = problems.grads(params, t), state, params
    (_, state), compiled = compilations.counted(lambda: jitted_update(row)(*arguments))  # noqa: B023
    assert t == 0 or compiled == 0


@every_row
def test_init_compiles_no_program_for_each_leaf(row):
  # The shapes are such that no other test has compiled for them.
  number = registry.ROWS.index(row)

  def programs(more, shape):
    params = row.params() | {"dense": {"kernel": 0, "bias": 0, "more": [0] * more}}
    params = jax.tree.map(lambda _: jnp.ones(shape), params)
    return compilations.count(lambda: transformation(row).init(params))

  few = programs(1, (17, number + 3))
  # A state of one array for all leaves has another shape.
  assert programs(9, (19, number + 3)) < few + 4


@every_row
def test_none_and_masked_leaves_pass_through(row):
  tx = transformation(row)
  params = row.params()
  holes = params | {"none": None, "masked": optax.MaskedNode()}
  grads = problems.grads(params)
  full = grads | {"none": None, "masked": optax.MaskedNode()}
  updates, _ = jitted_update(row)(full, tx.init(holes), holes)
  assert updates.pop("none") is None
  assert updates.pop("masked") == optax.MaskedNode()
  chex.assert_trees_all_equal(updates, first_update(row)[0])


@every_row
@pytest.mark.parametrize("params", [{}, ()], ids=repr)
def test_empty_trees(row, params):
  state = transformation(row).init(params)
  updates, after = jitted_update(row)(params, state, params)
  assert updates == params
  assert problems.spec(after) == problems.spec(state)


@every_factory
@pytest.mark.filterwarnings("ignore::optax_boost.NoEffectWarning")
@pytest.mark.parametrize("shapes", [[(0,)], [(), (0, 3), (3, 0), (1,), (1, 1)]], ids=str)
def test_scalars_and_leaves_without_entries(row, shapes):
  params = {f"{shape}": {"kernel": jnp.ones(shape)} for shape in shapes}
  state = row.make().init(params)
  grads = jax.tree.map(lambda p: jnp.full_like(p, 0.5), params)
  updates, after = jax.jit(row.make().update)(grads, state, params)
  assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
  chex.assert_tree_all_finite((updates, after))
  assert problems.spec(after) == problems.spec(state)


@every_row
@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_have_the_dtype_of_the_gradients_and_states_keep_their_dtypes(row, dtype, request):
  if dtype == "float64":
    request.getfixturevalue("x64")
  params, tx = row.params(dtype), transformation(row)
  state = jax.eval_shape(tx.init, params)
  updates, after = jax.eval_shape(tx.update, params, state, params)
  wide = jnp.promote_types(dtype, jnp.float32) if row.widens else jnp.dtype(dtype)
  assert {u.dtype for u in jax.tree.leaves(updates)} == {wide}
  assert problems.spec(after) == problems.spec(state)
  # The range of the others holds whatever float32's does.
  if dtype == "float16":
    grads = problems.grads(params)
    updates, _ = jax.jit(lambda grads, params: tx.update(grads, tx.init(params), params))(
      grads, params
    )
    chex.assert_tree_all_finite(updates)


@every_row
def test_neither_dtypes_nor_ranks_are_promoted_implicitly(row):
  """What a user forbids to find mixed precision, and arrays of wrong shapes."""
  params = row.params("bfloat16")
  grads, tx = problems.grads(params), transformation(row)
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    updates, _ = jax.eval_shape(
      lambda grads, params: tx.update(grads, tx.init(params), params), grads, params
    )
  assert jax.tree.structure(updates) == jax.tree.structure(grads)


@every_row
def test_injected_hyperparams_change_nothing(row):
  params = row.params()
  tx = transformation(row)
  factory = optax.inject_hyperparams(getattr(optax_boost, row.factory), static_args=row.static)
  injected = row.feed(factory(**row.kwargs))
  state = injected.init(params)
  step = jax.jit(lambda grads, state, params: injected.update(grads, state, params))
  inner = tx.init(params)
  for t in range(2):
    grads = problems.grads(params, t)
    arguments = grads, state, params
    (updates, state), compiled = compilations.counted(lambda: step(*arguments))  # noqa: B023
    assert t == 0 or compiled == 0
    expected, inner = jitted_update(row)(grads, inner, params)
    chex.assert_trees_all_close(updates, expected, rtol=1e-5, atol=1e-6)


@every_row
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_hyperparams_of_float32_widen_neither_updates_nor_states(row, dtype):
  factory = getattr(optax_boost, row.factory)
  options = {"static_args": row.static, "hyperparam_dtype": jnp.float32}
  tx = row.feed(optax.inject_hyperparams(factory, **options)(**row.kwargs))
  params = row.params(dtype)
  state = jax.eval_shape(tx.init, params)
  assert {h.dtype for h in jax.tree.leaves(state.hyperparams)} <= {jnp.dtype("f4"), jnp.dtype("i4")}
  # As `lax.scan` demands of its carry.
  updates, after = jax.eval_shape(tx.update, problems.grads(params), state, params)
  assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype("f4" if row.widens else dtype)}
  assert problems.spec(after) == problems.spec(state)


@every_factory
def test_inside_multi_steps_the_mean_gradient_arrives(row):
  params = row.params()
  tx = transformation(row)
  multi = optax.MultiSteps(tx, every_k_schedule=2)
  state = multi.init(params)
  grads = [problems.grads(params, t) for t in range(2)]
  step = jax.jit(multi.update)
  updates, state = step(grads[0], state, params)
  assert not any(np.any(u) for u in jax.tree.leaves(updates))
  updates, state = step(grads[1], state, params)
  mean = jax.tree.map(lambda a, b: (a + b) / 2, *grads)
  expected, _ = jitted_update(row)(mean, tx.init(params), params)
  chex.assert_trees_all_close(updates, expected, rtol=1e-4, atol=1e-6)


@every_factory
def test_inside_apply_if_finite_a_bad_step_changes_nothing(row):
  params = row.params()
  tx = optax.apply_if_finite(transformation(row), max_consecutive_errors=3)
  step = jax.jit(tx.update)
  _, state = step(problems.grads(params), tx.init(params), params)
  bad = jax.tree.map(lambda g: g.at[..., 0].set(jnp.nan), problems.grads(params))
  updates, after = step(bad, state, params)
  assert not any(np.any(u) for u in jax.tree.leaves(updates))
  chex.assert_trees_all_equal(after.inner_state, state.inner_state)


@every_row
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_step_after_a_bad_gradient_is_good(row, bad):
  params, step = row.params(), jitted_update(row)
  poisoned = problems.grads(params, 0)
  poisoned["dense"]["kernel"] = poisoned["dense"]["kernel"].at[3, 2].set(bad)
  poisoned["dense"]["bias"] = poisoned["dense"]["bias"].at[1].set(bad)
  _, state = step(poisoned, transformation(row).init(params), params)
  # The next good step of `accumulate` is the end of a window of two.
  for seed in (1, 2):
    updates, state = step(problems.grads(params, seed), state, params)
    chex.assert_tree_all_finite((updates, state))
    if jnp.any(updates["dense"]["kernel"]):
      return
  pytest.fail("no good step")


@every_row
def test_init_works_on_abstract_values(row):
  tx, params = row.make(), row.params()
  abstract = jax.eval_shape(lambda: params)
  assert problems.spec(jax.eval_shape(tx.init, abstract)) == problems.spec(tx.init(params))


@every_row
def test_a_step_inside_of_a_trace_on_known_arrays_returns_the_usual_dtypes(row):
  tx, params = row.optimizer(), row.params()
  traced = jax.eval_shape(lambda: step(tx, params, tx.init(params), 0))
  assert problems.spec(traced) == problems.spec(run(row, params, range(1)))
  state = tx.init(params)
  assert problems.spec(jax.eval_shape(lambda: step(tx, params, state, 0))) == problems.spec(traced)


@every_row
def test_boxes_in_the_state_hold_arrays_of_their_params_shapes(row):
  """Flax shards an array as its box says, by the names of the param's axes."""
  params = jax.tree.map(lambda x: nnx.Param(x, param_shape=x.shape), row.params())
  tx, grads = row.make(), problems.grads(params)
  state = jax.eval_shape(tx.init, params)
  is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
  for variable in filter(is_variable, jax.tree.leaves(state, is_leaf=is_variable)):
    assert jax.tree.leaves(variable)[0].shape == variable.param_shape
  # In a loop of one's own they may stay in their boxes.
  updates, after = jax.eval_shape(tx.update, grads, state, params)
  assert jax.tree.structure((updates, after)) == jax.tree.structure((grads, state))


@every_row
def test_optax_can_map_over_the_params_in_the_state(row):
  tx, params = row.make(), row.params()
  state = tx.init(params)
  chex.assert_trees_all_equal(optax.tree.map_params(tx, lambda v: v, state), state)


# On explicit axes the next test traces the step, and one in test_hostile.py runs it.
@every_row
def test_sharded_params_stay_sharded_and_are_not_gathered(row):
  mesh, params, tx = problems.mesh("Auto"), row.params(), row.make()
  grads = problems.grads(params)
  expected = first_update(row)
  with jax.set_mesh(mesh):
    sharded, grads = problems.sharded((params, grads), mesh)
    state = tx.init(sharded)
    compiled = jax.jit(tx.update).lower(grads, state, sharded).compile()
    updates, after = compiled(grads, state, sharded)
  assert ("all-gather" in compiled.as_text()) == row.gathers
  shardings = {x.shape: x.sharding for x in jax.tree.leaves(sharded)}
  for leaf in jax.tree.leaves((updates, after)):
    if leaf.shape in shardings:
      assert leaf.sharding.is_equivalent_to(shardings[leaf.shape], leaf.ndim)
  chex.assert_trees_all_close(
    jax.device_get((updates, after)), jax.device_get(expected), rtol=1e-5, atol=1e-6
  )


@every_row
def test_updates_and_states_on_a_mesh_with_explicit_axes_are_sharded_as_the_params(row):
  """From a state of sharded params, and from one without shardings, as Flax and pickle restore."""
  mesh, tx = problems.mesh("Explicit"), transformation(row)
  shapes = jax.eval_shape(row.params)
  with jax.set_mesh(mesh):
    params = jax.tree.map(lambda x: x.update(sharding=problems.last_axis_over(mesh, x)), shapes)
    state = jax.eval_shape(tx.init, params)
    restored = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state)
    results = jax.eval_shape(tx.update, params, state, params)
    restored_results = jax.eval_shape(tx.update, params, restored, params)
  shardings = {x.shape: x.sharding.spec for x in jax.tree.leaves(params)}
  for leaf in jax.tree.leaves((state, results, restored_results[0])):
    if leaf.shape in shardings:
      assert leaf.sharding.spec == shardings[leaf.shape]
  assert problems.spec(results[1]) == problems.spec(restored_results[1]) == problems.spec(state)


@every_row
def test_lowers_for_gpus_and_tpus_in_full_precision_without_calls_to_the_host(row):
  params = row.params()
  arguments = problems.grads(params), transformation(row).init(params), params
  export = jax.export.export(jitted_update(row), platforms=("cuda", "tpu"))
  if row.calls_host:
    with pytest.raises(NotImplementedError, match="callback"):
      export(*arguments)
  else:
    module = export(*arguments).mlir_module()
    assert "callback" not in module
    # Products of float32 would be of bfloat16's bits on a TPU, by default.
    products = [line for line in module.splitlines() if "stablehlo.dot_general" in line]
    assert not [line for line in products if "HIGHEST, HIGHEST" not in line]


@every_row
def test_refuses_gradients_of_another_tree(row):
  tx, params = row.make(), row.params()
  grads = problems.grads(params)
  state = tx.init(params)
  with pytest.raises(ValueError, match=r"same tree structure; got .* Pass the params that"):
    tx.update({"dense": grads["dense"]}, state, params)
  grads["dense"]["kernel"] = kernel = grads["dense"]["kernel"].T
  got = re.escape(f"got {kernel.shape} for the leaf 'dense/kernel' of shape")
  with pytest.raises(ValueError, match=got):
    tx.update(grads, state, params)


def _with_another_block(params):
  return {**params, "block_10": {"kernel": jnp.ones((16, 8)), "bias": jnp.zeros(8)}}


def _with_another_shape(params):
  return {**params, "dense": {**params["dense"], "bias": jnp.zeros(1)}}


OTHER_TREES = {
  "one more block": _with_another_block,
  "a shape that broadcasts": _with_another_shape,
}


@functools.cache
def _with_moments(row: registry.Row) -> optax.GradientTransformationExtraArgs:
  """The row with moments in it if it wraps anything, else before some."""
  moments = optax.trace(0.9)
  inside = {name: moments for name in ("inner", "first", "second") if name in row.kwargs}
  tx = dataclasses.replace(row, kwargs=row.kwargs | inside).make()
  if inside or row.descends is None:
    return tx
  return optax.chain(tx, moments)


@pytest.mark.parametrize("change", OTHER_TREES)
@every_row
def test_refuses_the_state_of_another_tree(row, change):
  tx, params = _with_moments(row), row.params()
  trees = params, OTHER_TREES[change](params)
  states = [jax.eval_shape(tx.init, tree) for tree in trees]
  for state, step_params in zip(states, reversed(trees), strict=True):
    call = functools.partial(optax_boost.apply_gradients, tx)
    arguments = problems.grads(step_params), state, step_params
    if problems.spec(states[0]) == problems.spec(states[1]):
      # Nothing in it is of the params: it is as good as their own.
      assert jax.eval_shape(call, *arguments)
    else:
      leaf = r"'([\w/]*(block_10/(kernel|bias)|dense/bias|trust_ratio))'"
      with pytest.raises(ValueError, match=f"must be the one that this transformation's .*{leaf}"):
        jax.eval_shape(call, *arguments)


@every_row
def test_refuses_integer_leaves(row):
  params = {"kernel": jnp.ones((2, 2)), "steps": jnp.ones((2, 2), jnp.int32)}
  with pytest.raises(TypeError, match=r"'steps' is int32. Leave it out with `optax.masked`"):
    row.make().init(params)


@pytest.fixture(scope="module")
def resumed(request, tmp_path_factory):
  """By row: what five steps end in, and what they do if a fresh process makes the last two.

  The rows of this run share a checkpoint and a process, since both take their time to start.
  """
  chosen = (item for item in request.session.items if "resumed" in item.fixturenames)
  rows = {str(row): row for row in (item.callspec.params["row"] for item in chosen)}
  # In the middle of a window or period of two steps.
  halfway = {name: run(row, row.params(), range(3)) for name, row in rows.items()}
  folder = tmp_path_factory.mktemp("resumed")
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "halfway", halfway)
  program = pathlib.Path(__file__).with_name("resume.py")
  result = subprocess.run(
    [sys.executable, str(program), str(folder), *rows],
    env=os.environ | {"PYTHONPATH": str(program.parents[2])},
    capture_output=True,
    text=True,
    check=False,
  )
  assert result.returncode == 0, result.stderr
  ends = {}
  for name, row in rows.items():
    params, state = halfway[name]
    expected = jax.tree.leaves(run(row, params, range(3, 5), state))
    with np.load(folder / f"{name}.npz") as file:
      ends[name] = expected, [file[f"arr_{i}"] for i in range(len(expected))]
  return ends


@factories_first
def test_resuming_in_a_fresh_process_changes_nothing(row, resumed):
  expected, found = resumed[str(row)]
  chex.assert_trees_all_equal(found, jax.device_get(expected))


# Layers in one leaf, along axis 0 or 1, and the same layers in leaves of their own.
LAYERS, AXES = 3, {"down": 0, "up": 1}
LAYERWISE = [
  row
  for row in registry.ROWS
  if {"layers", "groups"} & set(inspect.signature(getattr(optax_boost, row.factory)).parameters)
]


def scanned_loss(params, x):
  def layer(h, w):
    return h + jnp.tanh(h @ w["up"]) @ w["down"], None

  up = jnp.moveaxis(params["blocks"]["up"], 1, 0)
  h, _ = jax.lax.scan(layer, x, {"down": params["blocks"]["down"], "up": up})
  return jnp.mean((h @ params["head"]) ** 2)


def unrolled_loss(params, x):
  for down, up in zip(*params["blocks"].values(), strict=True):
    x = x + jnp.tanh(x @ up) @ down
  return jnp.mean((x @ params["head"]) ** 2)


def unrolled(params):
  blocks = {
    name: [jnp.take(leaf, i, AXES[name]) for i in range(LAYERS)]
    for name, leaf in params["blocks"].items()
  }
  return params | {"blocks": blocks}


def unrolled_subspace(space):
  return space._replace(mean=unrolled(space.mean), basis=jax.vmap(unrolled)(space.basis))


@pytest.mark.parametrize("row", LAYERWISE, ids=str)
def test_scanned_layers_get_the_updates_of_unrolled_layers(row):
  rng = np.random.default_rng(0)
  shapes = {"down": (LAYERS, 8, 8), "up": (8, LAYERS, 8)}
  blocks = {name: jnp.asarray(0.4 * rng.normal(size=s), "f4") for name, s in shapes.items()}
  params = {"blocks": blocks, "head": jnp.asarray(rng.normal(size=(8, 2)), "f4")}
  x = jnp.asarray(rng.normal(size=(16, 8)), "f4")
  arguments = inspect.signature(getattr(optax_boost, row.factory)).parameters
  results = []
  for loss, start in ((scanned_loss, params), (unrolled_loss, unrolled(params))):
    kwargs = dict(row.kwargs)
    if "subspace" in arguments:
      space = row.kwargs["subspace"](params)
      kwargs["subspace"] = space if loss is scanned_loss else unrolled_subspace(space)
    if "groups" in arguments:
      kwargs["groups"] = ["blocks/*/[01]", "head"]
      if row.factory == "adasum":
        kwargs["groups"] = ["head"]
      elif row.factory == "dim_reduce":
        # A subspace for each layer, and one for the rest.
        kwargs["groups"] = [*(f"blocks/*/{layer}" for layer in range(LAYERS)), "head"]
        if loss is scanned_loss:
          kwargs["groups"] = optax_boost.layer_axes(loss, start, x)
      elif loss is scanned_loss:
        kwargs["groups"] = optax_boost.layer_groups(
          start, ["blocks/down[*]|blocks/up[:,*]", "head"], num_groups=2
        )
    tx = row.feed(getattr(optax_boost, row.factory)(**kwargs))
    # Methods that take `layers` get them from the train step.
    step = optax_boost.make_train_step(loss, tx, donate=False)
    state = step.init(start)
    for _ in range(3):
      state, _ = step(state, x)
    results.append(state.params)
  ours, expected = unrolled(results[0]), results[1]
  chex.assert_trees_all_close(ours, expected, rtol=1e-4, atol=1e-5)
  moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), results[0], params)
  assert any(jax.tree.leaves(moved))
