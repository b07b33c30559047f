"""Steps in place: `update` and `apply_updates` in one, and a skipped step does nothing."""

import functools
import inspect
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from tests import closeness, compilations, problems
from tests.contract import registry


def dense_params(dtype: Any = jnp.float32) -> dict[str, Any]:
  """Two leaves for the tests of many nested wrappers: programs grow with the leaves."""
  return {"dense": problems.params(dtype)["dense"]}


def is_wrapper(tx: optax.GradientTransformation) -> bool:
  """Whether a transformation decides about the steps of another, which it makes in place."""
  form = getattr(tx.update, "form", None)
  return form is not None and form.step is not None


# Those that step in place, and two without a way of their own.
PLAIN = ("lars", "centralize")
ROWS = [
  row
  for row in registry.ROWS
  if row.extra is None and (row.factory in PLAIN or is_wrapper(row.make()))
]
every_row = pytest.mark.parametrize("row", ROWS, ids=str)
WRAPPERS = registry.wrappers()
CHECKED = {
  name: row
  for name, row in WRAPPERS.items()
  if "check" in inspect.signature(getattr(optax_boost, name)).parameters
}
NESTED = [
  ("dynamic_loss_scale", "accumulate"),
  ("accumulate", "dynamic_loss_scale"),
  ("master_weights", "dynamic_loss_scale"),
  ("dynamic_loss_scale", "master_weights"),
  ("master_weights", "accumulate"),
  ("accumulate", "master_weights"),
  ("master_weights", "dynamic_loss_scale", "accumulate"),
  ("accumulate", "dynamic_loss_scale", "master_weights"),
  ("stochastic_rounding", "dynamic_loss_scale"),
  ("accumulate", "stochastic_rounding"),
  ("average_params", "master_weights", "dynamic_loss_scale", "accumulate"),
]


def wrap(names: tuple[str, ...], tx: Any, check: str = "gradients") -> Any:
  for name in reversed(names):
    options: dict[str, Any] = {"check": check} if name in CHECKED else {}
    if "groups" in WRAPPERS[name].kwargs:
      options["groups"] = ("bias", "kernel|w[0-9]")
    tx = WRAPPERS[name].around(tx, **options)
  return tx


def two_calls(tx: Any, grads: Any, state: Any, params: Any, **extra: Any) -> Any:
  updates, state = tx.update(grads, state, params, **extra)
  return optax.apply_updates(params, updates), state


def train(step: Any, tx: Any, params: Any, bad: float | None = None, steps: int = 5) -> Any:
  """A few steps, of which the third and the seventh may have a bad gradient."""
  state = tx.init(params)
  for t in range(steps):
    grads = problems.grads(params, t)
    if t in (2, 6) and bad is not None:
      grads["dense"]["kernel"] = grads["dense"]["kernel"].at[3, 2].set(bad)
    params, state = step(grads, state, params)
  return params, state


def both(tx: Any, wrapped: Any = lambda step: step) -> tuple[Any, Any]:
  calls = (optax_boost.apply_gradients, two_calls)
  return tuple(wrapped(functools.partial(call, tx)) for call in calls)


def test_the_wrappers_have_a_step_in_place():
  assert {*WRAPPERS, *PLAIN} <= {row.factory for row in ROWS}


# The first row of each wrapper makes ten jitted steps below, alone and around others.
@pytest.mark.parametrize("row", [r for r in ROWS if r.factory in PLAIN or r.label], ids=str)
def test_apply_gradients_under_jit_equals_update_and_apply_updates(row):
  tx = row.optimizer() if row.factory in ("adasum", "centralize") else row.make()
  ours, theirs = (train(step, tx, problems.params()) for step in both(tx, jax.jit))
  chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-6)


@every_row
def test_apply_gradients_without_jit_equals_update_and_apply_updates_to_the_bit(row):
  tx, params = row.make(), problems.params()
  ours, theirs = (train(step, tx, params, steps=3) for step in both(tx))
  chex.assert_trees_all_equal(ours, theirs)


@pytest.mark.parametrize("names", [*((name,) for name in WRAPPERS), *NESTED], ids="-".join)
def test_steps_with_skipped_ones_are_the_same_to_the_bit(names):
  """Operation by operation, where no program is fused in another way than the other."""
  tx = wrap(names, optax.adam(0.1))
  with jax.disable_jit():
    ours, theirs = (train(step, tx, dense_params(), np.nan) for step in both(tx))
  chex.assert_trees_all_equal(ours, theirs)


@pytest.mark.parametrize("names", [*((name,) for name in WRAPPERS), *NESTED], ids="-".join)
def test_ten_jitted_steps_with_skipped_ones_differ_in_ulps(names):
  """Two programs contract products and sums differently: ulps of the params and of ten steps."""
  # Those that skip no step.
  rate, skipping = 0.1, names[0] not in ("average_params", "freeze_layers", "layerwise_decay")
  tx, start = wrap(names, optax.adam(rate)), dense_params()
  bad = np.nan if skipping else None
  ours, theirs = (train(step, tx, start, bad, steps=10)[0] for step in both(tx, jax.jit))

  def compare(found, expected, first):
    closeness.assert_within_ulps(found, expected, np.abs(first) + 10 * rate, 16)

  jax.tree.map(compare, *jax.device_get((ours, theirs, start)))


def test_windows_of_three_have_one_mean():
  """A third is not an exact number. Jitted, a product may be fused with a sum: one ulp a window."""
  tx = optax_boost.accumulate(optax.sgd(1.0), every=3)
  start, *grads = np.random.default_rng(0).normal(size=(10, 1000)).astype(np.float32)

  def run(step):
    params, state = jnp.asarray(start), tx.init(jnp.asarray(start))
    for g in grads:
      params, state = step(g, state, params)
    return params

  with jax.disable_jit():
    ours, theirs = map(run, both(tx))
  np.testing.assert_array_equal(ours, theirs)
  ours, theirs = map(run, both(tx, jax.jit))
  magnitudes = np.abs(start) + np.abs(grads).sum(0) / 3
  closeness.assert_within_ulps(ours, theirs, magnitudes, 3)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", CHECKED)
def test_a_step_in_which_the_optimizer_produces_nan_is_undone_and_counted_if_asked(name, jitted):
  """Adam without an eps divides zero by zero where a gradient is zero."""
  tx = wrap((name,), optax.adam(0.1, eps=0.0), check="updates")
  params, grads = jnp.array([1.0, 2.0]), jnp.array([0.0, 8.0])
  for step in both(tx, jax.jit if jitted else lambda step: step):
    after, state = step(grads, tx.init(params), params)
    np.testing.assert_array_equal(after, params)
    assert state.notfinite_count == 1
    assert not state.made
    assert not np.any(optax.tree.get(state, "mu"))


@pytest.mark.parametrize("name", CHECKED)
def test_by_default_only_the_gradients_are_checked_before_the_step(name):
  tx, params = WRAPPERS[name].around(optax.adam(0.1, eps=0.0)), jnp.array([1.0, 2.0])
  for step in both(tx, jax.jit):
    after, state = step(jnp.array([jnp.nan, 8.0]), tx.init(params), params)
    np.testing.assert_array_equal(after, params)
    assert state.notfinite_count == 1
    after, state = step(jnp.array([0.0, 8.0]), state, after)
    np.testing.assert_array_equal(np.isnan(after), [True, False])
    assert state.notfinite_count == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CHECKED)
def test_nan_of_an_optimizer_is_seen_and_counted_from_the_next_step_on(name, dtype):
  """Nothing guards single params, behind which a training would stand still unseen."""
  tx = WRAPPERS[name].around(optax.adam(0.1, eps=0.0))
  step = optax_boost.make_train_step(lambda p, x: jnp.sum((p * x) ** 2), tx)
  state, counts = step.init(jnp.array([1.0, 2.0], dtype)), []
  for _ in range(4):
    state, metrics = step(state, jnp.array([0.0, 8.0], dtype))
    (count,) = (value for key, value in metrics.items() if key.endswith("notfinite_count"))
    counts.append(int(count))
  assert counts == [0, 1, 2, 3]
  assert np.isnan(metrics["loss"])
  np.testing.assert_array_equal(np.isnan(np.asarray(state.params, np.float32)), [True, False])


GUARDED = [
  ("master_weights",),
  ("stochastic_rounding",),
  ("dynamic_loss_scale", "accumulate"),
  ("accumulate", "dynamic_loss_scale"),
  ("master_weights", "dynamic_loss_scale", "accumulate"),
]


@pytest.mark.parametrize("names", GUARDED, ids="-".join)
def test_nan_of_an_optimizer_inside_several_wrappers_never_reaches_the_params(names):
  tx = wrap(names, optax.adam(0.1, eps=0.0), check="updates")
  params = jnp.array([1.0, 2.0])
  for step in both(tx, jax.jit):
    after, state = params, tx.init(params)
    for _ in range(2):
      after, state = step(jnp.array([0.0, 8.0]), state, after)
    assert after[0] == 1.0
    assert jnp.isfinite(after[1])


@pytest.mark.parametrize("names", [*((name,) for name in WRAPPERS), *GUARDED[2:]], ids="-".join)
@pytest.mark.parametrize(("bad", "dtype"), [(1e30, "float32"), (np.nan, "float16")])
def test_a_bad_gradient_has_the_same_outcome_to_the_bit(names, bad, dtype):
  """1e30 is finite and its square is not; infinity is in the next test."""
  tx = wrap(names, optax.adam(0.1, eps=1e-3))
  ours, theirs = (train(step, tx, dense_params(dtype), bad) for step in both(tx))
  chex.assert_trees_all_equal(ours, theirs)


@pytest.mark.parametrize("names", GUARDED, ids="-".join)
def test_a_bad_gradient_has_the_same_outcome_jitted_nested_and_donated(names):
  tx = wrap(names, optax.adam(0.1))
  _, theirs = both(tx, jax.jit)
  donating = jax.jit(in_order(tx), donate_argnums=(0, 1))
  expected = train(theirs, tx, dense_params(), np.inf)
  donated = train(lambda g, s, p: donating(p, s, g), tx, dense_params(), np.inf)
  chex.assert_trees_all_close(donated, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("params_dtype", ["float16", "float32"])
def test_a_step_that_would_make_a_param_infinite_is_skipped_and_counted(params_dtype):
  tx = wrap(("dynamic_loss_scale",), optax.sgd(1.0, 0.9), check="updates")
  params = {"conv": jnp.array([1.0, -jnp.inf], params_dtype), "dense": jnp.ones(1, params_dtype)}
  large = 60_000.0 if params_dtype == "float16" else 3e38
  params["dense"] = -params["dense"] * large
  grads = {"conv": jnp.array([1.0, 0.0], params_dtype), "dense": jnp.full(1, large, params_dtype)}
  step = jax.jit(functools.partial(optax_boost.apply_gradients, tx))
  after, state = step(grads, tx.init(params), params)
  chex.assert_trees_all_equal(after, params)
  assert not any(np.any(x) for x in jax.tree.leaves(optax.tree.get(state, "trace")))
  assert state.notfinite_count == 1
  after, state = step(jax.tree.map(lambda g: g * 1e-3, grads), state, params)
  assert state.notfinite_count == 1
  assert after["conv"][0] < 1


@pytest.mark.parametrize("scale", [3.0, 2.0**127])
def test_update_and_apply_gradients_unscale_to_the_same_bits(scale):
  """Neither a power of two, nor one whose inverse is a normal number."""
  tx = optax_boost.dynamic_loss_scale(optax.sgd(1.0), scale, maximum=max(scale, 2.0**24))
  unscaled = jnp.linspace(0.1, 1.9, 100)
  params = {"dense": jnp.zeros(100)}
  for wrapped in (jax.jit, lambda step: step):
    ours, theirs = (
      step({"dense": unscaled * scale}, tx.init(params), params) for step in both(tx, wrapped)
    )
    chex.assert_trees_all_equal(ours, theirs)
    np.testing.assert_allclose(ours[0]["dense"], -unscaled, rtol=1e-6)


@pytest.mark.parametrize("weight", [np.nan, -1.0, 0.0, 2.0, 1e30])
def test_weights_have_the_same_effect_under_jit_and_without(weight):
  tx = optax_boost.accumulate(optax.sgd(1.0), every=2)
  results = []
  for step in both(tx, jax.jit):
    params = jnp.zeros(2)
    state = tx.init(params)
    for g, w in ((1.0, weight), (3.0, 2.0)):
      params, state = step(jnp.full(2, g), state, params, weight=jnp.float32(w))
    results.append((params, state))
  chex.assert_trees_all_close(*results, rtol=1e-6)


def test_unchecked_bad_gradients_spoil_their_window():
  tx = optax_boost.accumulate(optax.apply_if_finite(optax.sgd(1.0), 5), 2, not_finite=None)
  for step in both(tx, jax.jit):
    params = jnp.zeros(1)
    state = tx.init(params)
    for value in (1.0, jnp.nan, 1.0, 3.0):
      params, state = step(jnp.full(1, value), state, params)
    assert params == -2.0
    assert state.notfinite_count == 0


def test_a_loss_that_is_not_finite_skips_the_step():
  inner = optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(),
    lambda g, s, p=None, *, value, **_: (jax.tree.map(lambda x: x * value, g), s),
  )
  tx = optax_boost.dynamic_loss_scale(inner, 2.0, check="updates")
  params = jnp.ones(2)
  step = jax.jit(functools.partial(optax_boost.apply_gradients, tx))
  after, state = step(jnp.ones(2), tx.init(params), params, value=jnp.inf)
  np.testing.assert_array_equal(after, params)
  assert state.notfinite_count == 1


SIZE = 40_000


def in_order(tx: Any) -> Any:
  """A step whose results come in the order of its arguments, by which JAX reuses their memory."""
  return lambda params, state, grads: optax_boost.apply_gradients(tx, grads, state, params)


def compiled(tx: Any, leaves: int = 6, size: int = SIZE, dtype: Any = jnp.float32) -> Any:
  # Six leaves, so that one is far less than all.
  params = {f"w{i}": jnp.ones(size, dtype) for i in range(leaves)}
  step = jax.jit(in_order(tx), donate_argnums=(0, 1))
  return step.lower(params, tx.init(params), params).compile()


# JAX knows `pcast` for about as long as XLA for CPUs leaves no copies here.
newer_xla = pytest.mark.skipif(not hasattr(jax.lax, "pcast"), reason="older XLA copies")


@newer_xla
@pytest.mark.parametrize("inner", [optax.adam(0.1), optax.sgd(0.1, 0.9)], ids=["adam", "momentum"])
@pytest.mark.parametrize("name", ["accumulate", "dynamic_loss_scale"])
def test_a_step_needs_no_more_memory_than_one_leaf_and_its_moments(name, inner):
  size = 2**19
  program = compiled(wrap((name,), inner), size=size)
  # And, with optimization switched off for the tests, its gradient.
  assert program.memory_analysis().temp_size_in_bytes < 4.1 * size * 4


@pytest.mark.parametrize("name", ["accumulate", "dynamic_loss_scale", "master_weights"])
def test_params_and_inner_state_are_carried_through_a_loop(name):
  params = {"w": jnp.ones(SIZE)}
  tx = wrap((name,), optax.adam(0.1))
  step = functools.partial(optax_boost.apply_gradients, tx)
  jaxpr = jax.make_jaxpr(step)(params, tx.init(params), params).jaxpr
  large = [v.aval.size for v in jaxpr.outvars]
  loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "while"]
  carried = [sum(v.aval.shape == (SIZE,) for v in eqn.outvars) for eqn in loops]
  # Params, and Adam's two moments; masters have params besides.
  assert max(carried) == (4 if name == "master_weights" else 3)
  assert large.count(SIZE) == 4 if name != "dynamic_loss_scale" else 3


def test_loops_over_small_leaves_do_not_grow_with_their_number():
  tx = optax_boost.dynamic_loss_scale(optax.sgd(0.1))
  some, many = (max(compilations.loops(compiled(tx, leaves, 100))) for leaves in (16, 48))
  assert many < 1.2 * some


def test_small_leaves_are_rounded_by_numbers_of_one_kernel():
  tx = optax_boost.stochastic_rounding(optax.sgd(0.1), key=0)
  some, many = (compiled(tx, leaves, 100, jnp.bfloat16).as_text() for leaves in (4, 16))
  assert many.count("shift-left(") == some.count("shift-left(") > 0


@newer_xla
def test_an_idle_step_makes_no_updates():
  text = compiled(optax_boost.accumulate(optax.adam(0.1), 4), 1).as_text()
  entry = text[text.index("\nENTRY") :]
  whole = re.findall(rf"= f32\[{SIZE}\]\S* (\S+?)\(", entry)
  made = [name for name in whole if name not in ("parameter", "get-tuple-element", "bitcast")]
  assert len(made) == 1, "only the accumulator is written outside of the loops"


@pytest.mark.parametrize(
  ("kind", "names"),
  [
    *(("Explicit", (name,)) for name in WRAPPERS),
    *(("Auto", names) for names in (("accumulate",), *NESTED[:3])),
  ],
  ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_sharded_params_stay_sharded_and_are_not_gathered(names, kind):
  tx, params = wrap(names, optax.adam(0.1)), dense_params()
  grads = problems.grads(params)
  step = jax.jit(functools.partial(optax_boost.apply_gradients, tx))
  expected = step(grads, tx.init(params), params)
  mesh = problems.mesh(kind)
  with jax.set_mesh(mesh):
    sharded, placed = problems.sharded((params, grads), mesh)
    state = tx.init(sharded)
    program = step.lower(placed, state, sharded).compile()
    after = program(placed, state, sharded)
  assert "all-gather" not in program.as_text()
  for new, old in zip(jax.tree.leaves(after[0]), jax.tree.leaves(sharded), strict=True):
    assert new.sharding.is_equivalent_to(old.sharding, new.ndim)
  chex.assert_trees_all_close(jax.device_get(after), jax.device_get(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older XLA joins no all-reduces on CPUs")
@pytest.mark.parametrize(
  ("name", "leaves"),
  [("accumulate", 3), ("dynamic_loss_scale", 3), ("dynamic_loss_scale", 6), ("master_weights", 3)],
)
def test_an_ordinary_sharded_step_is_checked_in_one_all_reduce(name, leaves):
  """Outside of the loop with the exact check, which runs for gradients whose squares overflow."""
  mesh = problems.mesh("Auto")
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  params = [jax.device_put(jnp.ones(8 * (1000 + i)), sharding) for i in range(leaves)]
  tx = wrap((name,), optax.adam(0.1))
  state = tx.init(params)
  for step in both(tx, jax.jit):
    text = step.lower(params, state, params).compile().as_text()
    assert len(re.findall(r" all-reduce(?:-start)?\(", text[text.index("\nENTRY") :])) == 1


@pytest.mark.parametrize("name", ["accumulate", "dynamic_loss_scale"])
def test_all_devices_agree_on_an_overflow_of_one(name):
  mesh = problems.mesh("Auto")
  factory = {
    "accumulate": lambda tx: optax_boost.accumulate(tx, 1, axis_name="x"),
    "dynamic_loss_scale": lambda tx: optax_boost.dynamic_loss_scale(tx, 8.0, axis_name="x"),
  }[name]
  tx, spec = factory(optax.sgd(1.0, 0.9)), jax.sharding.PartitionSpec("x")
  params, grads = jnp.ones(8), jnp.ones(8).at[3].set(jnp.inf)
  state = tx.init(params)
  specs = jax.tree.map(lambda x: spec if x.shape else jax.sharding.PartitionSpec(), state)
  for step in both(tx):
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(spec, specs, spec), out_specs=(spec, specs))
    after, skipped = jax.jit(mapped)(grads, state, params)
    np.testing.assert_array_equal(after, params)
    assert skipped.notfinite_count == 1


@pytest.mark.parametrize("names", [("accumulate",), *NESTED[:2]], ids="-".join)
def test_it_can_be_mapped_over_a_population_and_scanned(names):
  tx = wrap(names, optax.adam(0.1))
  members = [jax.tree.map(lambda x, s=s: s * x, dense_params()) for s in (0.5, 1.0)]
  population = jax.tree.map(lambda *xs: jnp.stack(xs), *members)

  def body(carry: Any, t: jax.Array) -> Any:
    params, state = carry
    return optax_boost.apply_gradients(tx, problems.grads(params, t), state, params), None

  @jax.vmap
  def run(params: Any) -> Any:
    return jax.lax.scan(body, (params, tx.init(params)), jnp.arange(4))[0][0]

  found = run(population)
  step = jax.jit(functools.partial(optax_boost.apply_gradients, tx))
  for i, member in enumerate(members):
    expected, _ = train(step, tx, member, steps=4)
    one = jax.tree.map(lambda x, i=i: x[i], found)
    chex.assert_trees_all_close(one, expected, rtol=1e-5, atol=1e-6)


def test_wrappers_of_optax_and_plain_transformations_take_the_two_calls():
  tx = optax_boost.accumulate(optax.sgd(0.1), 2)
  assert is_wrapper(tx)
  assert is_wrapper(optax.with_extra_args_support(tx))
  assert is_wrapper(type(tx)(*tx))
  assert not is_wrapper(tx._replace(update=lambda *args, **kw: tx.update(*args, **kw)))
  plain = optax.GradientTransformation(tx.init, lambda g, s, p=None: tx.update(g, s, p))
  params = problems.params()
  ours, theirs = (train(step, plain, params) for step in both(plain))
  chex.assert_trees_all_equal(ours, theirs)


def test_lookahead_takes_the_gradients_of_its_fast_params():
  params = optax.LookaheadParams.init_synced(problems.params())
  grads = problems.grads(params.fast)
  tx = optax.lookahead(optax.sgd(0.1), 2, 0.5)
  ours, theirs = (step(grads, tx.init(params), params) for step in both(tx))
  chex.assert_trees_all_equal(ours, theirs)
  with pytest.raises(ValueError, match=r"gradients and params of the same tree"):
    optax_boost.apply_gradients(tx, optax.LookaheadParams(grads, grads), tx.init(params), params)
  around = optax_boost.accumulate(tx, 2)
  with pytest.raises(ValueError, match=r"the pair of params of `optax.lookahead`, .* Put"):
    around.update(grads, around.init(params), params)
  with pytest.raises(TypeError, match=r"For `optax.lookahead` write the step with"):
    optax_boost.make_train_step(lambda p, b: 0.0, tx).init(params)


def test_refuses_objects_that_are_not_transformations_and_gradients_of_other_params():
  params, tx = problems.params(), optax.sgd(0.1)
  grads, state = problems.grads(params), tx.init(params)
  with pytest.raises(TypeError, match=r"`tx` must be an optax.GradientTransformation; got"):
    optax_boost.apply_gradients(optax.sgd, grads, state, params)
  with pytest.raises(ValueError, match=r"`apply_gradients` needs gradients and params of the same"):
    optax_boost.apply_gradients(tx, {"dense": grads["dense"]}, state, params)
  grads["dense"]["kernel"] = grads["dense"]["kernel"].T
  with pytest.raises(ValueError, match=r"got \(8, 16\) for the leaf 'dense/kernel' of shape"):
    optax_boost.apply_gradients(tx, grads, state, params)


def test_arguments_in_the_order_of_optax_are_told_the_order():
  tx, params = optax.adam(0.1), {"w": jnp.ones(2)}
  state = tx.init(params)
  for arguments in ((params, params, state), (params, state, state)):
    with pytest.raises(ValueError, match=r"`apply_gradients\(tx, grads, state, params\)`"):
      optax_boost.apply_gradients(tx, *arguments)


def test_a_field_that_a_step_has_not_is_said_to_be_further_inside():
  params = jnp.ones(2)
  schedule_free = optax.contrib.schedule_free_sgd(0.1)
  state = optax_boost.accumulate(schedule_free, 2).init(params)
  with pytest.raises(
    AttributeError, match=r"no `b1`\. Its `inner_state` is the state of the optimizer"
  ):
    optax.contrib.schedule_free_eval_params(state, params)
  evaluated = optax.contrib.schedule_free_eval_params(state.inner_state, params)
  np.testing.assert_allclose(evaluated, params, rtol=1e-6)


def test_complex_gradients_are_checked_by_their_magnitudes():
  """The squares of 1e30 (1 + i) have a real part of zero."""
  tx = optax_boost.accumulate(optax.sgd(0.5), every=1)
  params = jnp.ones(2, jnp.complex64)
  step = jax.jit(functools.partial(optax_boost.apply_gradients, tx))
  after, state = step(jnp.full(2, 1e30 * (1 + 1j), jnp.complex64), tx.init(params), params)
  assert state.notfinite_count == 0
  np.testing.assert_allclose(after, -5e29 * (1 + 1j), rtol=1e-6)
  after, state = step(jnp.array([jnp.nan, 1j]), state, params)
  assert state.notfinite_count == 1
