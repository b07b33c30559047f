"""The one form of a transformation: what it wraps, how often it is traced, what it refuses."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from tests.contract import registry

CHECKING = {
  "dynamic_loss_scale": lambda tx: optax_boost.dynamic_loss_scale(tx, 2.0, check="updates"),
  "master_weights": lambda tx: optax_boost.master_weights(tx, check="updates"),
  "stochastic_rounding": lambda tx: optax_boost.stochastic_rounding(tx, key=0, check="updates"),
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
def test_an_inner_optimizer_is_traced_twice_and_once_more_if_its_result_is_checked(
  names, door, dtype
):
  calls = []
  tx = wrap(names, counting(calls))
  params = {"w": jnp.ones(3, dtype)}
  state = tx.init(params)

  def step(params, state):
    if door == "update":
      return tx.update(params, state, params)
    return optax_boost.apply_gradients(tx, params, state, params)

  jax.make_jaxpr(step)(params, state)
  assert 1 <= len(calls) <= 2 + any(name in CHECKING for name in names)


@pytest.mark.parametrize("names", [*((name,) for name in CHECKING), *NESTED], ids="-".join)
def test_outside_of_jit_a_step_whose_result_is_checked_is_computed_twice(names):
  calls = []
  tx, params = wrap(names, counting(calls)), jnp.ones(3)
  state = tx.init(params)
  for _ in range(2):
    params, state = optax_boost.apply_gradients(tx, params, state, params)
  assert len(calls) == (2 if "accumulate" in names else 4)


def test_every_factory_has_the_one_form():
  subspace = optax_boost.Subspace(jnp.zeros(3), jnp.eye(3)[:2], jnp.ones(2), jnp.ones(2) / 2)
  # Their rows feed them arguments, in a transformation of the tests.
  fed = [
    optax_boost.adasum("x"),
    optax_boost.dim_reduce(subspace),
    optax_boost.svrg(refresh_every=2),
  ]
  names = ("adasum", "dim_reduce", "svrg")
  rows = [
    getattr(optax_boost, row.factory)(**row.kwargs)
    for row in registry.ROWS
    if row.factory not in names
  ]
  methods = {tx.update.form.method for tx in (*fed, *rows)}
  factories = {row.factory for row in registry.ROWS}
  assert {f.removeprefix("scale_by_").partition("_trust")[0] for f in factories} <= methods


PARAMS = {"a": jnp.ones(2), "b": jnp.ones(2)}


def frozen(tx):
  return optax_boost.freeze_layers(tx, ["a", "b"], optax_boost.fixed_freezing(2, 1))


def scaled(tx):
  return optax_boost.dynamic_loss_scale(tx)


def averaged(tx):
  return optax_boost.average_params(tx, start=0)


def apply(tx, params):
  return optax_boost.apply_gradients(tx, PARAMS, tx.init(params), PARAMS)


SGD, LAST = optax.sgd(1.0), {"a": False, "b": True}
OF_ROOT = CHECKING | {"average_params": averaged, "freeze_layers": frozen}
ANYWHERE = {
  "accumulate": lambda tx: optax_boost.accumulate(tx, 2),
  "skip_spikes": optax_boost.skip_spikes,
  "layerwise_decay": lambda tx: optax_boost.layerwise_decay(tx, ["a", "b"]),
}
HOLDERS = {
  "optax.chain": lambda tx: optax.chain(optax.clip(1.0), tx),
  "optax.chain, first": lambda tx: optax.chain(tx, optax.identity()),
  "optax.chain, named": lambda tx: optax.named_chain(("first", optax.clip(1.0)), ("last", tx)),
  "optax.masked": lambda tx: optax.masked(tx, LAST),
  "optax.partition": lambda tx: optax.partition({"x": tx, "y": SGD}, {"a": "y", "b": "x"}),
  "optax.inject_stateful_hyperparams": lambda tx: optax.inject_hyperparams(lambda rate: tx)(0.1),
  "optax.apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
  "optax.MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
  "optax.contrib.schedule_free": lambda tx: optax.contrib.schedule_free(tx, 0.1),
  "optax.contrib.sam": lambda tx: optax.contrib.sam(tx, SGD),
  "your_transformation": lambda tx: optax.GradientTransformation(
    tx.init, lambda updates, state, params: tx.update(updates, state, params)
  ),
  "your_transformation, of optax": optax.flatten,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_step_that_does_more_than_change_updates_is_refused_below_the_root(holder):
  called = holder.partition(",")[0]
  for name, wrapper in OF_ROOT.items():
    words = rf"`{name}` must be around the whole .* `{called}`. Write `{name}\({called}\(\.\.\.\), "
    tx = HOLDERS[holder](wrapper(SGD))
    if name == "freeze_layers" and holder.endswith("of optax"):
      continue  # the groups are of other leaves than the flat ones
    with pytest.raises(ValueError, match=words):
      apply(tx, PARAMS)
    step = optax_boost.make_train_step(lambda p, x: jnp.sum(p["a"] + p["b"]) * x, tx)
    with pytest.raises(ValueError, match=words):
      step(step.init(PARAMS), 1.0)
    if called != "your_transformation":
      with pytest.raises(ValueError, match=words):
        optax_boost.accumulate(tx, 2).init(PARAMS)


@pytest.mark.parametrize("name", OF_ROOT)
def test_a_step_below_lookahead_is_refused_where_its_state_is_seen(name):
  tx = optax.lookahead(OF_ROOT[name](SGD), 2, 0.5)
  params = optax.LookaheadParams.init_synced(PARAMS)
  with pytest.raises(ValueError, match=rf"Write `{name}\(optax\.lookahead\("):
    optax_boost.apply_gradients(tx, PARAMS, tx.init(params), params)


def test_averages_below_the_root_are_refused_where_they_are_read():
  tx = optax.chain(averaged(SGD))
  with pytest.raises(ValueError, match=r"Write `average_params\(optax\.chain\("):
    optax_boost.averaged_params(tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("name", ["accumulate", "skip_spikes"])
@pytest.mark.parametrize("around", [lambda tx: tx, averaged], ids=["the root", "an average"])
def test_members_of_a_chain_after_a_step_that_may_be_skipped_are_refused(name, around):
  step = ANYWHERE[name](SGD)
  for tx in (
    optax.chain(step, optax.add_decayed_weights(0.1)),
    optax.named_chain(("step", step), ("decay", optax.scale(0.5))),
    optax.chain(optax.partition({"x": step, "y": SGD}, {"a": "x", "b": "y"}), optax.clip(1.0)),
  ):
    words = rf"`{name}` must be the last member of a chain.*Write `{name}\(optax\.chain\("
    with pytest.raises(ValueError, match=words):
      apply(around(tx), PARAMS)


@pytest.mark.parametrize("holder", [h for h in HOLDERS if "first" not in h and "sam" not in h])
def test_a_step_that_only_changes_updates_may_stand_anywhere(holder):
  """Windows stand where those of `optax.MultiSteps` may, and give the same params."""

  def after(windows):
    tx = HOLDERS[holder](windows(optax.adam(0.1)))
    params, state = PARAMS, tx.init(PARAMS)
    step = jax.jit(
      lambda grads, state, params: optax_boost.apply_gradients(tx, grads, state, params)
    )
    for t in range(8):
      grads = {"a": jnp.array([t - 3.0, 0.2]), "b": jnp.array([0.1, 5.0 - t])}
      params, state = step(grads, state, params)
    return params

  got = after(lambda tx: optax_boost.accumulate(tx, 2))
  want = after(lambda tx: optax.MultiSteps(tx, 2).gradient_transformation())
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), got, want)
  for name in ("skip_spikes", *["layerwise_decay"][: not holder.endswith("of optax")]):
    tx = HOLDERS[holder](ANYWHERE[name](SGD))
    optax_boost.apply_gradients(tx, PARAMS, tx.init(PARAMS), PARAMS)


JUDGES = {
  "dynamic_loss_scale": optax_boost.dynamic_loss_scale,
  "accumulate": functools.partial(optax_boost.accumulate, every=2),
  "skip_spikes": optax_boost.skip_spikes,
  "master_weights": optax_boost.master_weights,
}


@pytest.mark.parametrize("name", JUDGES)
def test_a_batch_is_judged_on_all_devices_where_these_exchange_gradients(name):
  # One device that left its batch out let the others wait in Adasum until XLA ended the process.
  inner = optax.chain(optax_boost.adasum("devices"), optax.sgd(1.0))
  with pytest.raises(ValueError, match=rf"`{name}` needs `axis_name`.*`{name}\(\.\.\., axis_name="):
    averaged(JUDGES[name](inner)).init(PARAMS)
  JUDGES[name](inner, axis_name="devices").init(PARAMS)
  averaged(optax_boost.accumulate(inner, 2, not_finite=None)).init(PARAMS)


@pytest.mark.parametrize("method", ["laperm", "switch_after", "dim_reduce"])
def test_a_method_that_is_a_part_of_a_step_holds_no_step(method):
  plane = optax_boost.Subspace(
    PARAMS, jax.tree.map(lambda p: jnp.ones((1, 2)) / 2, PARAMS), jnp.ones(1), jnp.ones(1)
  )
  around = {
    "laperm": lambda tx: optax_boost.laperm(tx, 2),
    "switch_after": lambda tx: optax_boost.switch_after(1, optax.sgd(1.0), tx),
    "dim_reduce": lambda tx: optax_boost.dim_reduce(plane, inner=tx),
  }[method]
  for wrapper in (averaged, lambda tx: optax_boost.accumulate(optax.masked(tx, LAST), 4)):
    words = rf"`{method}` can't hold `(\w+)`, .*Put it around: `\1\({method}\(\.\.\.\), \.\.\.\)`"
    with pytest.raises(ValueError, match=words):
      around(wrapper(SGD)).init(PARAMS)


@pytest.mark.parametrize("bad", [None, jnp.nan])
def test_wrappers_of_optax_pass_on_whether_a_step_was_made(bad):
  inner = optax.masked(optax_boost.accumulate(optax.sgd(1.0), 2), True)
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


@pytest.mark.parametrize("name", WRAPPERS)
def test_two_of_a_kind_are_refused_when_they_are_written(name):
  words = rf"`{name}` can't be put around an optimizer that has `{name}` already: .*Leave one of"
  with pytest.raises(ValueError, match=words):
    wrap([name, "accumulate" if name != "accumulate" else "average_params", name], SGD)


def test_steps_in_place_take_leaves_without_a_dtype_and_keys():
  tx, params = optax.sgd(0.5), {"w": 2.0}
  after, _ = optax_boost.apply_gradients(tx, {"w": 1.0}, tx.init(params), params)
  assert after == {"w": 1.5}


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


def test_a_field_that_two_slots_have_is_read_from_the_slot():
  class Keyed(NamedTuple):
    key: int

  params = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2, jnp.bfloat16)}
  state = frozen(optax_boost.stochastic_rounding(SGD, key=1)).init(params)
  assert state.key is state.precision.key
  with pytest.raises(
    AttributeError, match=r"`key` is a field of several states: .*`state\.precision\.key`"
  ):
    state._replace(freezing=Keyed(0)).key  # noqa: B018
  with pytest.raises(AttributeError, match="no `loss_scale`"):
    state.loss_scale  # noqa: B018
