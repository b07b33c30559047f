"""The state of other params, or of another optimizer, is named before a step is made with it."""

import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_boost
import optax_boost.nnx

PARAMS = {"a": jnp.ones(3), "b": jnp.ones(2)}
OTHERS = {"a": jnp.ones(3)}
REQUIRED = r"must be the one that this transformation's `init` made of these params; "


def loss_fn(params, batch):
  return sum(jnp.sum(leaf) * batch for leaf in jax.tree.leaves(params))


def steps(tx, state, params=PARAMS):
  """A step with a state, through each door that checks whose it is."""
  step = optax_boost.make_train_step(loss_fn, tx, donate=False)
  trained = step.init(params)._replace(opt_state=state)
  return {
    "apply_gradients": lambda: optax_boost.apply_gradients(tx, params, state, params),
    "train_step": lambda: step(trained, 1.0),
  }


@pytest.mark.parametrize("door", ["apply_gradients", "train_step"])
@pytest.mark.parametrize(
  ("tx", "state", "words"),
  [
    (
      optax.adam(0.1),
      optax.sgd(0.1, momentum=0.9).init(PARAMS),
      r"it lacks the leaf '0/count'\. Make it with",
    ),
    (
      optax_boost.accumulate(optax.sgd(0.1), 2),
      optax_boost.accumulate(optax.sgd(0.1), 2).init(OTHERS),
      r"it lacks the leaf 'accumulation/accumulator/b'",
    ),
    (
      optax.adam(0.1),
      optax.adam(0.1).init({"a": jnp.ones(()), "b": jnp.ones(2)}),
      r"its leaf '0/mu/a' must have the shape \(3,\) and the dtype float32; got \(\)",
    ),
  ],
  ids=["another optimizer's", "of other params", "of params that would broadcast"],
)
def test_another_state_is_named_by_what_tells_it_apart(tx, state, words, door):
  with pytest.raises(ValueError, match=REQUIRED + words):
    steps(tx, state)[door]()


def test_a_state_with_or_without_a_wrapper_is_told_where_the_inner_state_is():
  plain, wrapper = (
    optax.sgd(0.1, momentum=0.9),
    optax_boost.skip_spikes(optax.sgd(0.1, momentum=0.9)),
  )
  state = plain.init(PARAMS)
  with pytest.raises(ValueError, match=REQUIRED + r".* inside, it goes to the field `inner_state`"):
    steps(wrapper, state)["train_step"]()
  steps(wrapper, wrapper.init(PARAMS)._replace(inner_state=state))["train_step"]()
  wrapped = wrapper.init(PARAMS)
  with pytest.raises(
    ValueError, match=REQUIRED + r".* inside of this wrapper is its field `inner_"
  ):
    steps(plain, wrapped)["train_step"]()
  steps(plain, wrapped.inner_state)["train_step"]()


def test_dicts_in_the_place_of_named_tuples_are_refused_by_name():
  """Orbax returns them if a checkpoint is restored without a target."""
  step = optax_boost.make_train_step(lambda params, x: jnp.sum(params["a"] * x), optax.adam(0.1))
  state = step.init(PARAMS)
  adam, *rest = state.opt_state
  restored = state._replace(opt_state=[adam._asdict(), *rest])
  with pytest.raises(ValueError, match=REQUIRED + "it lacks the named tuple ScaleByAdamState"):
    step(restored, 1.0)


HALF = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(2, jnp.bfloat16)}


def frozen(frozen_groups, **kwargs):
  schedule = optax_boost.fixed_freezing(2, frozen_groups, steps=4)
  return optax_boost.freeze_layers(optax.adam(0.1), ["a", "b"], schedule, **kwargs)


def statistics(name):
  return {"start": 0, "model_state": {name: jnp.ones(3)}}


@pytest.mark.parametrize(
  ("first", "second", "words"),
  [
    (
      optax_boost.stochastic_rounding(optax.sgd(0.1), 0),
      optax_boost.master_weights(optax.sgd(0.1)),
      "it lacks the leaf 'precision/master_params/a'",
    ),
    (
      optax_boost.master_weights(optax.sgd(0.1)),
      optax_boost.master_weights(optax.sgd(0.1), key=0),
      "it lacks the leaf 'precision/key'",
    ),
    (
      optax_boost.average_params(optax.sgd(0.1), **statistics("mean")),
      optax_boost.average_params(optax.sgd(0.1), **statistics("average")),
      "it lacks the leaf 'averaging/statistics/average'",
    ),
    (frozen(1, counts="run"), frozen(1), "it lacks the leaf 'freezing/group_counts/0'"),
  ],
  ids=["rounding", "key", "statistics", "counts"],
)
@pytest.mark.parametrize("jitted", [False, True])
def test_a_wrapper_refuses_the_state_of_another_configuration(first, second, words, jitted):
  update = jax.jit(second.update) if jitted else second.update
  with pytest.raises(ValueError, match=REQUIRED + f".*{words}"):
    update(HALF, first.init(HALF), HALF)


@pytest.mark.parametrize(
  "wrapper",
  [
    optax_boost.master_weights,
    functools.partial(optax_boost.accumulate, every=2),
    functools.partial(optax_boost.average_params, decay=0.5),
    optax_boost.dynamic_loss_scale,
  ],
)
def test_a_leaf_that_gets_another_name_in_mid_run_is_refused_by_its_name(wrapper):
  """JAX's hash of a tree ignores the keys of dicts, so the two trees have one hash."""
  tx = wrapper(optax.adam(0.1))
  renamed = {"a": PARAMS["a"], "c": PARAMS["b"]}
  _, state = optax_boost.apply_gradients(tx, PARAMS, tx.init(PARAMS), PARAMS)
  for step in (lambda: tx.update(renamed, state, renamed), *steps(tx, state, renamed).values()):
    with pytest.raises(ValueError, match=REQUIRED + r"it lacks the leaf '.*/c'"):
      step()
  tx.update(renamed, tx.init(renamed), renamed)


def as_lists(tree):
  """A state whose tuples are lists, as some formats of files restore them."""
  if isinstance(tree, tuple) and hasattr(tree, "_fields"):
    return type(tree)(*map(as_lists, tree))
  return list(map(as_lists, tree)) if isinstance(tree, tuple) else tree


@pytest.mark.parametrize("jitted", [False, True])
def test_lists_in_the_place_of_tuples_are_refused(jitted):
  for tx in (frozen(0), optax_boost.accumulate(optax.adam(0.1), 1)):
    update = jax.jit(tx.update) if jitted else tx.update
    with pytest.raises(ValueError, match=REQUIRED + "it has a list in place of a tuple"):
      update(HALF, as_lists(tx.init(HALF)), HALF)


def test_a_wrapper_refuses_a_state_that_would_broadcast():
  tx = optax_boost.accumulate(optax.sgd(0.1), 2)
  with pytest.raises(ValueError, match=REQUIRED + "its leaf 'accumulation/accumulator/a' must"):
    tx.update(PARAMS, tx.init(PARAMS | {"a": jnp.ones(1)}))


def test_the_error_is_about_the_gradients_even_if_the_state_also_belongs_to_other_params():
  tx = optax_boost.accumulate(optax.sgd(0.1), 2)
  with pytest.raises(ValueError, match=r"got gradients that lack \['b'\]. Pass the params that"):
    tx.update(OTHERS, tx.init(OTHERS), PARAMS)


@pytest.mark.parametrize("around", [optax_boost.accumulate, optax_boost.average_params])
def test_an_error_of_a_step_with_its_own_state_arrives_unchanged(around):
  def update(updates: Any, state: Any, params: Any = None) -> Any:
    raise ValueError("out of luck")

  inner = optax.GradientTransformation(optax.sgd(0.1).init, update)
  tx = around(inner, **({"every": 1} if around is optax_boost.accumulate else {"start": 0}))
  with pytest.raises(ValueError, match=r"^out of luck"):
    optax_boost.apply_gradients(tx, PARAMS, tx.init(PARAMS), PARAMS)


def test_a_state_whose_scalars_become_arrays_is_not_refused():
  def update(updates: Any, state: Any, params: Any = None) -> Any:
    return updates, jnp.ones(3)

  inner = optax.GradientTransformation(lambda params: jnp.zeros([]), update)
  grads, state = PARAMS, inner.init(PARAMS)
  for _ in range(2):
    params, state = optax_boost.apply_gradients(inner, grads, state, PARAMS)
  assert params["a"][0] == 2


def test_the_optimizer_of_another_nnx_model_is_refused_by_the_train_step():
  model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
  other = nnx.Linear(2, 5, rngs=nnx.Rngs(0))
  tx = optax_boost.dynamic_loss_scale(optax.adam(0.1))
  optimizer = nnx.Optimizer(other, tx, wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(lambda model, x: jnp.sum(model(x)))
  with pytest.raises(ValueError, match=REQUIRED + r"its leaf 'inner_state/0/mu/bias' must have"):
    step(model, optimizer, jnp.ones((1, 2)))


def test_a_state_is_compared_once_for_each_kind_of_params():
  calls = []
  inner = optax.adam(0.1)

  def init(params: Any) -> Any:
    calls.append(1)
    return inner.init(params)

  tx = optax.GradientTransformation(init, inner.update)
  state, params = tx.init(PARAMS), PARAMS
  for _ in range(3):
    params, state = optax_boost.apply_gradients(tx, PARAMS, state, params)
  assert len(calls) == 2


def test_an_init_without_a_hash_and_a_restored_dict_are_taken():
  @dataclasses.dataclass
  class Init:
    rate: float

    def __call__(self, params: Any) -> Any:
      return optax.adam(self.rate).init(params)

  tx = optax.GradientTransformation(Init(0.1), optax.adam(0.1).update)
  optax_boost.apply_gradients(tx, PARAMS, tx.init(PARAMS), PARAMS)
  named = optax.named_chain(("first", optax.adam(0.1)), ("second", optax.scale(0.5)))
  optax_boost.apply_gradients(named, PARAMS, dict(named.init(PARAMS)), PARAMS)
