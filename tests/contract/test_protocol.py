"""How methods, ours and a user's own, speak to the train step: by the types of their states."""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost._form import _protocol
from tests.contract import registry


def bowl(params: Any, batch: Any) -> jax.Array:
  return sum(jnp.sum((leaf - batch) ** 2) for leaf in jax.tree.leaves(params))


class ClippedState(NamedTuple):
  """State of a method that a user might write."""

  rate: jax.Array
  largest: jax.Array
  seen: Any
  metrics = ("largest", "clipped/rate")


def clipped(rate: float) -> optax.GradientTransformationExtraArgs:
  def init(params):
    return ClippedState(jnp.float32(rate), jnp.float32(0), params)

  def update(updates, state, params=None, **extra):
    del params, extra
    updates = jax.tree.map(lambda g: -state.rate * g, updates)
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(u)) for u in jax.tree.leaves(updates)]))
    return updates, state._replace(largest=largest)

  return optax.GradientTransformationExtraArgs(init, update)


def test_a_users_own_method_reports_metrics_as_ours_do():
  params = {"w": jnp.zeros(3)}
  step = optax_boost.make_train_step(bowl, optax.chain(clipped(0.1), optax.identity()))
  state, metrics = step(step.init(params), 1.0)
  np.testing.assert_allclose(state.params["w"], 0.2, rtol=1e-6)
  np.testing.assert_allclose(metrics["largest"], 0.2, rtol=1e-6)
  np.testing.assert_allclose(metrics["clipped/rate"], 0.1, rtol=1e-6)


def test_a_declared_field_that_does_not_exist_is_refused():
  class Mistaken(NamedTuple):
    count: Any
    metrics = ("norm",)

  with pytest.raises(TypeError, match=r"`Mistaken` declares `norm` .* fields are: count"):
    _protocol.read_metrics(Mistaken(0))
  with pytest.raises(TypeError, match=r"declares `norm` in its `requests`"):
    _protocol.declares(requests=("norm",))(Mistaken)


def test_a_field_may_be_called_metrics():
  class Reporting(NamedTuple):
    metrics: Any
    requests: Any

  assert _protocol.read_metrics(Reporting(jnp.ones(3), jnp.ones(2))) == {}
  assert not _protocol.is_requested(Reporting(1, 2), "full_gradient")


def test_names_of_metrics_stay_when_a_wrapper_is_added():
  inner = optax_boost.lars(0.1, exclude=None)
  wrapped = optax_boost.dynamic_loss_scale(optax_boost.accumulate(inner, 2))
  names = []
  for tx in (inner, wrapped):
    step = optax_boost.make_train_step(bowl, tx)
    names.append(step(step.init({"w": jnp.ones(3)}), 0.0)[1].keys())
  assert names[0] < names[1]
  assert {"lars/notfinite_count", "notfinite_count"} <= names[1]


LABELS = {"a": "ours", "b": "other"}


@pytest.mark.parametrize(
  "wrap",
  [
    lambda tx: optax.partition({"ours": tx, "other": optax.sgd(0.1)}, LABELS),
    lambda tx: optax.masked(tx, {"a": True, "b": False}),
  ],
  ids=["partition", "masked"],
)
@pytest.mark.parametrize("name", ["grad_fn", "value_fn", "full_grad_fn", "obj_fn"])
def test_closures_take_params_whose_leaves_are_hidden(wrap, name):
  seen = {}

  def update(updates, state, params=None, **extra):
    assert isinstance(params["b"], optax.MaskedNode)
    seen[name] = extra[name](jax.tree.map(lambda p: p + 1, params))
    return updates, state

  tx = wrap(optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update))
  full = {"full_grad_fn": lambda g, p: g(p, 1.0)} if name == "full_grad_fn" else {}
  step = optax_boost.make_train_step(lambda p, b: jnp.sum(p["a"] * p["b"] * b), tx, **full)
  params = {"a": jnp.ones(2), "b": jnp.full(2, 3.0)}
  with jax.disable_jit():
    step(step.init(params), 1.0)
  if name.startswith(("value", "obj")):
    assert seen[name] == 12.0
  else:
    np.testing.assert_allclose(seen[name]["a"], 3.0)
    assert isinstance(seen[name]["b"], optax.MaskedNode)


def test_the_opaque_mode_of_sam_trains_as_its_transparent_one():
  params = {"w": jnp.arange(3.0)}
  adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
  opaque = optax.contrib.sam(optax.sgd(0.1), adversary, sync_period=2, opaque_mode=True)
  step = optax_boost.make_train_step(bowl, opaque)
  state = step.init(params)
  for _ in range(4):
    state, _ = step(state, 1.0)
  plain = optax.contrib.sam(optax.sgd(0.1), adversary, sync_period=2, opaque_mode=True)
  expected, opt_state = params, plain.init(params)
  for _ in range(4):
    grad = jax.grad(bowl)(expected, 1.0)
    updates, opt_state = plain.update(
      grad, opt_state, expected, grad_fn=lambda p, i: jax.grad(bowl)(p, 1.0)
    )
    expected = optax.apply_updates(expected, updates)
  chex.assert_trees_all_close(state.params, expected, rtol=1e-6)


# What permutes params leaves no step as it is.
WRAPPERS = {name: row for name, row in registry.holders().items() if name != "laperm"}
SVRG = optax.chain(optax_boost.svrg(refresh_every=2), optax.sgd(0.1))
INSIDE = {
  "a line search": optax.chain(
    optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=10)
  ),
  "sam": optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05)),
  "sophia": optax.contrib.sophia(0.1),
  "svrg of a part": optax.partition({"ours": SVRG, "other": optax.sgd(0.1)}, LABELS),
}


# Freezing needs a state over which `optax.tree.map_params` can map.
REFUSED = ("freeze_layers", "a line search")


def after_two_steps(tx):
  step = optax_boost.make_train_step(bowl, tx, full_grad_fn=lambda grad, p: grad(p, 1.0))
  state = step.init({"a": jnp.arange(3.0), "b": jnp.ones(2)})
  for _ in range(2):
    state, _ = step(state, 2.0)
  return state.params


@functools.cache
def alone(name):
  return after_two_steps(INSIDE[name])


@pytest.mark.filterwarnings("ignore:`full_grad_fn` has no effect")
@pytest.mark.parametrize(
  ("wrapper", "name"), [pair for pair in itertools.product(WRAPPERS, INSIDE) if pair != REFUSED]
)
def test_every_wrapper_forwards_the_requests_of_its_optimizer(wrapper, name):
  found = after_two_steps(WRAPPERS[wrapper].around(INSIDE[name], **WRAPPERS[wrapper].quiet))
  chex.assert_trees_all_close(found, alone(name), rtol=1e-5)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Network:
  """A model as a tree, as Equinox has them, with attributes of its class."""

  w: jax.Array
  metrics = ("accuracy",)
  requests = ("full_gradient",)
  steps = ("down", "up")


def test_a_class_of_the_params_may_have_attributes_of_any_name():
  tx = optax_boost.average_params(optax.adam(0.1), decay=0.9)
  step = optax_boost.make_train_step(bowl, tx)
  state, metrics = step(step.init(Network(jnp.zeros(3))), 1.0)
  assert set(metrics) == {"loss", "average_params/snapshot_count"}
  assert np.all(state.params.w > 0)
