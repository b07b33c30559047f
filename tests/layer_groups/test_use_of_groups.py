"""Groups in the methods that take them: with which params they fit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost import LayerSlice
from optax_boost._foundation import _paths
from tests.layer_groups import layouts
from tests.layer_groups.models import chain_params

NAMES = ["d", "c", "b", "a"]


def layers_of_chain(number):
  params = chain_params(number)
  return params, optax_boost.layer_groups(params, NAMES[-number:])


def test_groups_of_a_deeper_model_are_refused_on_a_shallower_one():
  groups, shallow = layers_of_chain(4)[1], chain_params(3)
  words = r"groups for other params: they have the leaf 'd/bias', which these params lack"
  with pytest.raises(ValueError, match=f"`layerwise_decay` was given {words}"):
    optax_boost.layerwise_decay(optax.sgd(0.1), groups, 0.5).init(shallow)
  frozen = optax_boost.freeze_layers(optax.sgd(0.1), groups, optax_boost.fixed_freezing(4, 1))
  with pytest.raises(ValueError, match=f"`freeze_layers` was given {words}"):
    frozen.init(shallow)


@pytest.mark.parametrize("instead", [None, optax.MaskedNode()])
@pytest.mark.parametrize("whole", [True, False])
def test_leaves_of_groups_may_be_hidden(instead, whole):
  params, groups = layers_of_chain(3)
  hidden = params | {"c": instead if whole else jax.tree.map(lambda _: instead, params["c"])}
  decay = optax_boost.layerwise_decay(optax.identity(), groups, 0.5)
  ones = jax.tree.map(jnp.ones_like, hidden)
  updates, _ = decay.update(ones, decay.init(hidden))
  assert [updates[name]["bias"][0] for name in "ba"] == [0.5, 1.0]


def test_groups_may_be_in_an_optimizer_and_in_the_wrapper_around_it():
  params, groups = layers_of_chain(3)
  tx = optax_boost.layerwise_decay(optax.adam(0.1), groups, 0.5)
  tx = optax_boost.freeze_layers(tx, groups, optax_boost.fixed_freezing(3, 1))
  assert optax.tree.get(tx.init(params), "mu").keys() == params.keys()


@pytest.mark.parametrize("name", ["vit", "gpt2", "t5", "resnet 34"])
def test_layerwise_decay_gives_the_rates_of_the_recipe(name):
  """The last group has the rate, each before it `decay` of the next; block by block."""
  layout = layouts.LAYOUTS[name]()
  groups = optax_boost.layer_groups(layout.params, layout.names)
  tx = optax_boost.layerwise_decay(optax.sgd(1.0), groups, 0.75)
  # Rates are by leaf: JAX compiles nothing for each shape of a leaf.
  ones = jax.tree.map(lambda _: np.ones((), np.float32), layout.params)
  updates, _ = tx.update(ones, tx.init(ones), ones)
  rates = dict(zip(_paths.leaf_paths(updates), jax.tree.leaves(updates), strict=True))
  for number, beginnings in enumerate(layout.groups):
    found = [rate for path, rate in rates.items() if path.startswith(beginnings)]
    assert found
    rate = 0.75 ** (len(layout.groups) - 1 - number)
    np.testing.assert_allclose(found, np.full(len(found), -rate), rtol=1e-6)


@pytest.mark.parametrize(
  ("groups", "words"),
  [
    (
      ((LayerSlice("w", 0, 0, 1),), (LayerSlice("w", 0, 2, 3), "v")),
      r"they have layers \[0, 2\] along axis 0 of the leaf 'w' of",
    ),
    (
      ((LayerSlice("w", 0, 0, 1), "v"), (LayerSlice("w", 0, 1, 3),)),
      r"they have layers \[0, 1, 2\] along axis 0 of the leaf 'w'",
    ),
    (
      ((LayerSlice("w", 1, 0, 1), "v"), (LayerSlice("w", 1, 2, 3),)),
      r"they have layers \[0, 2\] along axis 1 of the leaf 'w'",
    ),
    (
      ((LayerSlice("w", 0, 0, 2), "v"), (LayerSlice("w", 0, 1, 2),)),
      r"each of its layers along one axis, is once; got 'w\[1:2\]'",
    ),
    (
      ((LayerSlice("w", 0, 0, 1), "v"), (LayerSlice("w", 1, 1, 2),)),
      r"along one axis, is once; got 'w\[:, 1:2\]' in group 1",
    ),
    ((("w", "v"), ("w",)), r"is once; got 'w' in group 1"),
    ((("w", "v"), (LayerSlice("w", 0, 0, 2),)), r"is once; got 'w\[0:2\]' in group 1"),
    (((LayerSlice("w", 0, 0, 2), "v"), ("w",)), r"is once; got 'w' in group 1"),
    ((("w",), ()), r"they have no group with the leaf 'v'"),
  ],
)
def test_groups_made_by_hand_must_have_each_layer_once(groups, words):
  params = {"w": jnp.ones((2, 2)), "v": jnp.ones(2)}
  plan = optax_boost.LayerGroups(groups, (1,) * len(groups))
  with pytest.raises(ValueError, match=words):
    optax_boost.layerwise_decay(optax.sgd(0.1), plan).init(params)
  frozen = optax_boost.fixed_freezing(len(groups), 1)
  with pytest.raises(ValueError, match=words):
    optax_boost.freeze_layers(optax.sgd(0.1), plan, frozen).init(params)


def test_groups_made_by_hand_may_list_layers_in_any_order():
  params = {"w": jnp.ones((2, 3))}
  plan = optax_boost.LayerGroups(
    ((LayerSlice("w", 1, 2, 3),), (LayerSlice("w", 1, 0, 1), LayerSlice("w", 1, 1, 2))), (2, 4)
  )
  decay = optax_boost.layerwise_decay(optax.identity(), plan, 0.5)
  updates, _ = decay.update(params, decay.init(params))
  assert updates["w"].tolist() == [[1.0, 1.0, 0.5]] * 2
