"""Leaf paths, patterns and masks."""

from collections import OrderedDict
import dataclasses
from typing import Any, NamedTuple
import warnings

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost._foundation import _masks, _paths, _selectors, _tree_checks

PARAMS = {"block": [{"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}, {"scale": jnp.ones(3)}]}


class Attention(NamedTuple):
  query: Any
  value: Any


class ValueHead(NamedTuple):
  value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Gated:
  gate: Any
  value: Any


@pytest.mark.parametrize("node", [Attention, Gated])
def test_a_field_that_is_called_value_stays_whatever_a_mask_hides(node):
  first, *_ = (field for field in ("query", "gate") if field in node.__annotations__)
  for other in (jnp.ones(1), None, optax.MaskedNode()):
    tree = {"block": node(other, jnp.ones(2))}
    assert _paths.leaf_paths(tree)[-1] == "block/value"
  masked = {"block": node(optax.MaskedNode(), jnp.ones(2))}
  assert _paths.leaf_paths(masked, _masks.is_masked) == [f"block/{first}", "block/value"]
  mask = optax_boost.path_mask("value")({"block": node(jnp.ones(1), jnp.ones(2))})
  assert jax.tree.leaves(mask) == [False, True]


LINEAR = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)


@pytest.mark.parametrize(
  ("tree", "paths"),
  [
    (PARAMS, ["block/0/bias", "block/0/kernel", "block/1/scale"]),
    (jnp.ones(2), [""]),
    ({"a": None, "b": optax.MaskedNode()}, []),
    ({"value": jnp.ones(1)}, ["value"]),
    ({"critic": ValueHead(jnp.ones(1))}, ["critic/value"]),
    (LINEAR, ["bias", "kernel"]),
    (nnx.to_pure_dict(LINEAR), ["bias", "kernel"]),
    ({"dense": {"bias": nn.Partitioned(jnp.ones(2), names=(None,))}}, ["dense/bias"]),
  ],
)
def test_paths_join_keys_and_indices_and_leave_out_the_boxes_of_flax(tree, paths):
  assert _paths.leaf_paths(tree) == paths


def test_an_error_for_a_function_among_the_leaves_says_to_leave_it_out():
  with pytest.raises(TypeError, match=r"'activation' is .* Keep it out of `params`, as `equinox"):
    optax_boost.lars(0.1).init({"activation": jnp.tanh, "w": jnp.ones(2)})
  with pytest.raises(TypeError, match=r"Keep it out of `params`"):
    optax_boost.layer_groups({"activation": jnp.tanh}, ["activation"])


@pytest.mark.parametrize(
  ("grads", "words"),
  [
    ({"a": {"w": 1.0}}, r"that lack \['a/b', 'c'\]\. Pass"),
    ({"a": {"w": 1.0, "b": 1.0, "z": 1.0}}, r"that lack \['c'\] and have \['a/z'\]\. Pass"),
    ({"a": OrderedDict(b=1.0, w=1.0), "c": 1.0}, r"have the containers .* instead of PyTreeDef\("),
  ],
)
def test_an_error_for_gradients_of_another_tree_names_the_differences(grads, words):
  with pytest.raises(ValueError, match=words):
    _tree_checks.check_same_tree(grads, {"a": {"w": 1.0, "b": 1.0}, "c": 1.0}, "lars")


def test_patterns_are_silent_on_an_empty_tree():
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    assert _selectors.select({}, "kernel", "exclude") == []


@pytest.mark.parametrize(
  ("selector", "expected"),
  [
    (None, [False, False, False]),
    ("kernel", [False, True, False]),
    (["kernel", "scale"], [False, True, True]),
    ({"block": [True, False]}, [True, True, False]),
    (lambda tree: jax.tree.map(lambda x: x.ndim == 2, tree), [False, True, False]),
  ],
)
def test_selectors_of_every_form_select_the_same_leaves(selector, expected):
  assert _selectors.select(PARAMS, selector, "exclude") == expected


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class CallableModule:
  """A module that is a tree and a function at once, as Equinox's are."""

  kernel: Any
  bias: Any

  def __call__(self, x):
    return x @ self.kernel + self.bias


def test_a_callable_module_of_bools_is_a_mask():
  params, mask = CallableModule(jnp.ones((2, 2)), jnp.ones(2)), CallableModule(True, False)
  _selectors.check_selector("exclude", mask)
  assert _selectors.select(params, mask, "exclude") == [True, False]


@pytest.mark.parametrize("exclude", [np.array([True, False]), jnp.array([True, False])])
def test_an_array_is_refused_as_a_selector(exclude):
  with pytest.raises(TypeError, match=r"`exclude` must be patterns, a tree of bools"):
    optax_boost.lars(0.1, exclude=exclude)
