"""The one form of a transformation: what it wraps, how often it is traced, what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost import _orders
from optax_boost import _protocol
from optax_boost import _transformation
from tests.contract import registry

CHECKING = {
  "dynamic_loss_scale": lambda tx: optax_boost.dynamic_loss_scale(tx, 2.0),
  "master_weights": optax_boost.master_weights,
  "stochastic_rounding": lambda tx: optax_boost.stochastic_rounding(tx, key=0),
}
WRAPPERS = CHECKING | {
  "accumulate": lambda tx: optax_boost.accumulate(tx, 2),
  "average_params": lambda tx: optax_boost.average_params(tx, decay=0.5),
}
NESTED = (
  ("master_weights", "dynamic_loss_scale", "accumulate"),
  ("dynamic_loss_scale", "master_weights"),
  ("average_params", "accumulate", "dynamic_loss_scale"),
)


def wrap(names, tx):
  for name in reversed(names):
    tx = WRAPPERS[name](tx)
  return tx


def counting(calls):
  inner = optax.adam(0.1)

  def update(updates, state, params=None, **extra_args):
    calls.append(1)
    return inner.update(updates, state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(inner.init, update)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("door", ["update", "apply_gradients"])
@pytest.mark.parametrize("names", [*((name,) for name in WRAPPERS), *NESTED], ids="-".join)
def test_an_inner_optimizer_is_traced_at_most_twice(names, door, dtype):
  calls = []
  tx = wrap(names, counting(calls))
  params = {"w": jnp.ones(3, dtype)}
  state = tx.init(params)

  def step(params, state):
    if door == "update":
      return tx.update(params, state, params)
    return optax_boost.apply_gradients(tx, params, state, params)

  jax.make_jaxpr(step)(params, state)
  assert 1 <= len(calls) <= 2


@pytest.mark.parametrize("names", [*((name,) for name in CHECKING), *NESTED], ids="-".join)
def test_outside_of_jit_an_inner_optimizer_is_called_once_a_step(names):
  calls = []
  tx, params = wrap(names, counting(calls)), jnp.ones(3)
  state = tx.init(params)
  for _ in range(2):
    params, state = optax_boost.apply_gradients(tx, params, state, params)
  assert len(calls) == (1 if "accumulate" in names else 2)


def test_every_factory_has_the_one_form():
  subspace = optax_boost.Subspace(jnp.zeros(3), jnp.eye(3)[:2], jnp.ones(2), jnp.ones(2) / 2)
  # Their rows feed them arguments, in a transformation of the tests.
  fed = [
    optax_boost.adasum("x"),
    optax_boost.dim_reduce(subspace),
    optax_boost.svrg(refresh_every=2),
  ]
  names = ("adasum", "dim_reduce", "svrg")
  rows = [row.make() for row in registry.ROWS if row.factory not in names]
  methods = {tx.update.form.method for tx in (*fed, *rows)}
  factories = {row.factory for row in registry.ROWS}
  assert {f.removeprefix("scale_by_").partition("_trust")[0] for f in factories} <= methods


INNER = optax_boost.centralize()
IN_OPTAX = {
  "apply_if_finite": optax.apply_if_finite(INNER, 5),
  "chain": optax.chain(optax.identity(), INNER),
  "conditionally_mask": optax.transforms.conditionally_mask(INNER, lambda step: True),
  "conditionally_transform": optax.transforms.conditionally_transform(INNER, lambda step: True),
  "lookahead": optax.lookahead(INNER, 2, 0.5),
  "masked": optax.masked(INNER, True),
  "MultiSteps": optax.MultiSteps(INNER, 2).gradient_transformation(),
  "named_chain": optax.named_chain(("first", optax.identity()), ("second", INNER)),
  "partition": optax.partition({"x": INNER, "y": optax.sgd(1.0)}, "x"),
  "sam": optax.contrib.sam(INNER, optax.sgd(1.0)),
  "schedule_free": optax.contrib.schedule_free(INNER, 1.0),
  "split_real_and_imaginary": optax.contrib.split_real_and_imaginary(INNER),
  "with_extra_args_support": optax.with_extra_args_support(optax.GradientTransformation(*INNER)),
  "chain in a mask in MultiSteps": optax.MultiSteps(
    optax.masked(optax.chain(INNER), True), 2
  ).gradient_transformation(),
}


@pytest.mark.parametrize("name", IN_OPTAX)
def test_the_transformations_inside_optax_wrappers_are_found(name):
  assert [form.method for form in _transformation.forms(IN_OPTAX[name])] == ["centralize"]


def test_other_functions_are_not_searched_for_transformations():
  """A model that a user's function captures may be large, and is no wrapper."""

  def update(updates, state, params=None, **extra_args):
    return INNER.update(updates, state, params, **extra_args)

  tx = optax.GradientTransformationExtraArgs(INNER.init, update)
  assert _transformation.forms(tx) == []
  update.wraps = INNER
  assert [form.method for form in _transformation.forms(tx)] == ["centralize"]


def schedule():
  return optax_boost.fixed_freezing(2, frozen_groups=1)


def frozen(tx):
  return optax_boost.freeze_layers(tx, ["a", "b"], schedule())


REFUSED_IN_INIT = {
  "accumulate in freezing": (
    lambda: frozen(optax_boost.accumulate(optax.sgd(1.0), 2)),
    r"`freeze_layers` can't hold `accumulate`: .* `accumulate\(freeze_layers\(...\)\)`",
  ),
  "MultiSteps in freezing": (
    lambda: frozen(optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()),
    r"`optax.MultiSteps\(freeze_layers\(...\)\)` or `accumulate\(freeze_layers\(...\)\)`",
  ),
  "accumulate in a chain in freezing": (
    lambda: frozen(optax.chain(optax.identity(), optax_boost.accumulate(optax.sgd(1.0), 2))),
    r"`freeze_layers` can't hold `accumulate`",
  ),
  "masters in freezing": (
    lambda: frozen(optax_boost.master_weights(optax.sgd(1.0))),
    r"`freeze_layers` can't hold `master_weights`: .* `master_weights\(freeze_layers\(...\)\)`",
  ),
  "rounding in freezing": (
    lambda: frozen(optax_boost.stochastic_rounding(optax.sgd(1.0), key=0)),
    r"`freeze_layers` can't hold `stochastic_rounding`",
  ),
  "average in freezing": (
    lambda: frozen(optax_boost.average_params(optax.sgd(1.0), start=0)),
    r"`average_params\(freeze_layers\(...\)\)`",
  ),
  "average in a switch": (
    lambda: optax_boost.switch_after(
      1, optax_boost.average_params(optax.sgd(1.0), start=0), optax.sgd(1.0)
    ),
    r"`average_params\(switch_after\(...\)\)`",
  ),
  "a scale after another in a chain": (
    lambda: optax_boost.accumulate(
      optax.chain(optax.clip(1.0), optax_boost.dynamic_loss_scale(optax.sgd(1.0))), 2
    ),
    r"a loss scale must come first in a chain: .* `dynamic_loss_scale\(optax.chain\(...\)\)`",
  ),
  "masters before another in a chain": (
    lambda: optax_boost.accumulate(
      optax.chain(optax_boost.master_weights(optax.sgd(1.0)), optax.clip(1.0)), 2
    ),
    r"`master_weights` must come last in a chain: .* place 1 of 2.* `master_weights\(optax.chain",
  ),
}


@pytest.mark.parametrize("name", REFUSED_IN_INIT)
def test_orders_that_cannot_be_right_are_refused_in_init(name):
  make, message = REFUSED_IN_INIT[name]
  with pytest.raises(ValueError, match=message):
    make().init({"a": jnp.ones(2), "b": jnp.ones(2)})


REFUSED_AS_A_WHOLE = {
  "clipping before a scale": optax.chain(
    optax.clip_by_global_norm(1.0), optax_boost.dynamic_loss_scale(optax.sgd(1.0))
  ),
  "svrg before a scale": optax.chain(
    optax_boost.svrg(refresh_every=2), optax_boost.dynamic_loss_scale(optax.sgd(1.0))
  ),
  "a decay after masters": optax.chain(
    optax_boost.master_weights(optax.sgd(1.0)), optax_boost.layerwise_decay(["a", "b"])
  ),
  "clipping after masters of a part": optax.chain(
    optax.partition(
      {"x": optax_boost.master_weights(optax.sgd(1.0)), "y": optax.sgd(1.0)}, {"a": "x", "b": "y"}
    ),
    optax.clip(1.0),
  ),
}


@pytest.mark.parametrize("door", ["apply_gradients", "train_step"])
@pytest.mark.parametrize("name", REFUSED_AS_A_WHOLE)
def test_wrong_orders_in_a_chain_are_refused_by_the_train_step_and_apply_gradients(name, door):
  tx, params = REFUSED_AS_A_WHOLE[name], {"a": jnp.ones(2), "b": jnp.ones(2)}
  step = optax_boost.make_train_step(lambda p, b: jnp.sum(p["a"] * b), tx)
  calls = {
    "apply_gradients": lambda: optax_boost.apply_gradients(tx, params, tx.init(params), params),
    "train_step": lambda: step(step.init(params), 1.0),
  }
  with pytest.raises(ValueError, match=r"must come (first|last) in a chain"):
    calls[door]()


@pytest.mark.parametrize(
  "moments", [optax.adamw(0.1), optax.sgd(0.1, 0.9), optax.ema(0.9)], ids=["adamw", "sgd", "ema"]
)
def test_moments_after_freeze_layers_in_a_chain_are_refused(moments):
  params = {"a": jnp.ones(2), "b": jnp.ones(2)}
  schedule = optax_boost.fixed_freezing(2, 1)

  def frozen(inner):
    return optax_boost.freeze_layers(inner, ["a", "b"], schedule)

  tx = optax.chain(frozen(optax.identity()), optax.chain(optax.clip(1.0), moments))
  with pytest.raises(
    ValueError, match=r"`freeze_layers` must hold the whole.* inside: `freeze_lay"
  ):
    optax_boost.apply_gradients(tx, params, tx.init(params), params)
  step = optax_boost.make_train_step(lambda p, _: jnp.sum(p["a"] * p["b"]), tx)
  state = step.init(params)
  with pytest.raises(ValueError, match=r"`freeze_layers` must hold the whole"):
    step(state, None)
  after = optax.chain(optax.add_decayed_weights(0.1), frozen(moments), optax.scale(0.5))
  first, second = {"a": True, "b": False}, {"a": False, "b": True}
  apart = optax.chain(optax.masked(frozen(moments), first), optax.masked(moments, second))
  for tx in (after, apart):
    optax_boost.apply_gradients(tx, params, tx.init(params), params)


def test_masters_of_half_precision_inside_apply_if_finite_are_refused_with_the_order_that_works():
  tx = optax.apply_if_finite(optax_boost.master_weights(optax.sgd(1.0)), 5)
  half = jnp.ones(2, jnp.bfloat16)
  with pytest.raises(ValueError, match=r"`master_weights\(optax.apply_if_finite\(...\)\)`"):
    optax_boost.apply_gradients(tx, half, tx.init(half), half)
  params = jnp.ones(2)
  after, _ = optax_boost.apply_gradients(tx, params, tx.init(params), params)
  np.testing.assert_array_equal(after, 0)


@pytest.mark.parametrize("bad", [None, jnp.nan])
def test_whether_a_step_was_made_travels_outwards_through_chains_of_optax(bad):
  inner = optax.chain(optax.clip(10.0), optax_boost.accumulate(optax.sgd(1.0), 2))
  tx, params = optax_boost.average_params(inner, start=0), jnp.zeros(2)
  state, made = tx.init(params), []
  for t in range(4):
    grads = jnp.full(2, 1.0 if bad is None or t > 1 else bad)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    made.append(bool(state.made))
  assert made == ([False, True, False, True] if bad is None else [False, False, False, True])
  assert state.snapshot_count == sum(made)


def test_parts_side_by_side_make_a_step_if_one_of_them_does():
  labels = {"a": "x", "b": "y"}
  tx = optax_boost.average_params(
    optax.partition({"x": optax_boost.accumulate(optax.sgd(1.0), 2), "y": optax.sgd(1.0)}, labels),
    start=0,
  )
  params = {"a": jnp.ones(2), "b": jnp.ones(2)}
  _, state = tx.update(params, tx.init(params), params)
  assert state.made
  alone = optax_boost.average_params(
    optax.partition(
      {"x": optax_boost.accumulate(optax.sgd(1.0), 2), "y": optax.set_to_zero()}, labels
    ),
    start=0,
  )
  _, state = alone.update(params, alone.init(params), params)
  assert not state.made


def test_each_side_of_a_switch_reports_its_own_steps():
  """The first makes a step in each call, the second in every second one."""
  tx = optax_boost.average_params(
    optax_boost.switch_after(2, optax.sgd(1.0), optax_boost.accumulate(optax.sgd(1.0), 2)), start=0
  )
  params = jnp.zeros(1)
  state, made = tx.init(params), []
  for _ in range(6):
    updates, state = tx.update(jnp.ones(1), state, params)
    params = optax.apply_updates(params, updates)
    made.append(bool(state.made))
  assert made == [True, True, False, True, False, True]
  assert _protocol.made_step(tx.init(params), state) == made[-1]


def test_a_function_around_an_update_that_bears_its_attributes_is_called():
  inner = optax_boost.accumulate(optax.sgd(1.0), every=1)

  @functools.wraps(inner.update)
  def update(updates, state, params=None, **extra_args):
    halves = jax.tree.map(lambda g: g / 2, updates)
    return inner.update(halves, state, params, **extra_args)

  tx, params = optax.GradientTransformationExtraArgs(inner.init, update), jnp.ones(3)
  for outer in (tx, optax_boost.average_params(tx, decay=0.5)):
    after, _ = optax_boost.apply_gradients(outer, jnp.ones(3), outer.init(params), params)
    assert after.tolist() == [0.5] * 3


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("door", ["update", "apply_gradients"])
@pytest.mark.parametrize("name", CHECKING)
def test_a_state_in_float16_that_overflows_is_not_kept(name, door, jitted):
  def init(params):
    return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float16), params)

  def update(updates, state, params=None):
    sums = jax.tree.map(lambda g, s: g + s.astype(jnp.float32), updates, state)
    return jax.tree.map(lambda s: -1e-6 * s, sums), sums

  tx = CHECKING[name](optax.GradientTransformation(init, update))

  def step(params, state):
    grads = jnp.full(3, 8e4 if name == "dynamic_loss_scale" else 4e4)
    if door == "apply_gradients":
      return optax_boost.apply_gradients(tx, grads, state, params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params = jnp.ones(3)
  state = tx.init(params)
  step = jax.jit(step) if jitted else step
  for _ in range(2):
    params, state = step(params, state)
  assert state.notfinite_count == 1
  assert state.inner_state.dtype == jnp.float16
  np.testing.assert_allclose(state.inner_state, 4e4, rtol=1e-3)
  np.testing.assert_allclose(params, 0.96, rtol=1e-3)


def test_groups_are_found_in_a_wrapper_that_names_its_extra_arguments():
  freezing = optax_boost.fixed_freezing(2, 1)
  inner = optax_boost.freeze_layers(optax.sgd(1.0), ["body", "head"], freezing)

  def update(updates, state, params=None, value=None):
    return inner.update(updates, state, params)

  update.wraps = inner
  wrapper = optax.GradientTransformationExtraArgs(inner.init, update)
  step = optax_boost.make_train_step(
    lambda params, batch: jnp.sum(params["body"] * params["head"]),
    optax_boost.dynamic_loss_scale(wrapper),
  )
  state, metrics = step(step.init({"body": jnp.ones(2), "head": jnp.ones(2)}), None)
  assert metrics["frozen_groups"] == 1
  assert state.params["body"].tolist() == [1, 1]
  assert state.params["head"].tolist() == [0, 0]


def test_updates_of_two_scales_have_the_dtype_of_gradients_and_params():
  tx = optax_boost.dynamic_loss_scale(optax_boost.dynamic_loss_scale(optax.sgd(1.0), 2.0), 2.0)
  params = jnp.ones(3, jnp.float16)
  updates, _ = tx.update(4 * params, tx.init(params), params)
  assert updates.dtype == jnp.float16
  assert updates.tolist() == [-1] * 3


def test_steps_in_place_take_leaves_without_a_dtype_and_keys():
  tx, params = optax.sgd(0.5), {"w": 2.0}
  after, _ = optax_boost.apply_gradients(tx, {"w": 1.0}, tx.init(params), params)
  assert after == {"w": 1.5}
  # No dtype of a param that is trained.
  _orders.check(tx.init(params), {"key": jax.random.key(0), "count": jnp.zeros(2, jnp.int8)})


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_train_step_takes_wrappers_inside_flatten(name):
  def train(tx):
    step = optax_boost.make_train_step(lambda params, x: jnp.sum(params["w"] ** 2 * x), tx)
    state = step.init({"w": jnp.ones((2, 3)), "b": jnp.ones(2)})
    for _ in range(2):
      state, _ = step(state, jnp.ones(3))
    return state.params["w"]

  wrapped = train(optax.flatten(wrap([name], optax.sgd(0.1))))
  steps = 1 if name == "accumulate" else 2
  np.testing.assert_allclose(wrapped, np.full((2, 3), 0.8**steps), rtol=1e-6)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("door", ["update", "apply_gradients"])
@pytest.mark.parametrize("name", CHECKING)
def test_an_infinite_param_that_would_turn_nan_is_kept_and_counted(name, door, jitted):
  """Weight decay adds infinity to minus infinity; an infinite param without it stays."""
  params = jnp.array([1.0, -jnp.inf])

  def after(inner):
    tx = CHECKING[name](inner)

    def step(params, state):
      grads = jnp.array([1.0, 0.0])
      if door == "apply_gradients":
        return optax_boost.apply_gradients(tx, grads, state, params)
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    step = jax.jit(step) if jitted else step
    stepped, state = step(params, tx.init(params))
    return stepped, state.notfinite_count

  decayed = optax.chain(optax.add_decayed_weights(0.1), optax.scale(-1.0))
  stepped, count = after(decayed)
  assert stepped.tolist() == [1, -np.inf]
  assert count == 1
  stepped, count = after(optax.sgd(0.5))
  np.testing.assert_allclose(
    stepped, [1 - (0.25 if name == "dynamic_loss_scale" else 0.5), -np.inf]
  )
  assert count == 0
