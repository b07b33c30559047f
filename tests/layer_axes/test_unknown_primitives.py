"""A primitive that the analysis does not know is named, with what the user can write."""

import re

import jax
import jax.extend
from jax.interpreters import ad, mlir
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost._foundation import _paths
from optax_boost._trace import _primitives

# A primitive of no program but these, so no rule for a real one can end its being unknown. It
# reverses all axes, so it is its own transpose.
UNHEARD_OF = jax.extend.core.Primitive("unheard_of")
UNHEARD_OF.def_abstract_eval(lambda x: x)
ad.deflinear2(UNHEARD_OF, lambda cotangent, x: [UNHEARD_OF.bind(cotangent)])
mlir.register_lowering(UNHEARD_OF, mlir.lower_fun(jnp.flip, multiple_results=False))

X = jnp.ones((2, 4))
EPS = np.finfo(np.float32).eps
GRADS = {
  "kernel": np.random.default_rng(0).normal(size=(3, 4, 4)).astype(np.float32),
  "head": np.random.default_rng(1).normal(size=(4, 1)).astype(np.float32),
}
STACKED = {"kernel": jnp.ones((3, 4, 4)), "head": jnp.ones((4, 1))}
NAMED = re.escape(
  "A trace of the loss does not tell the axes of 'kernel' after `unheard_of`. Say them: pass the"
  " result of `optax_boost.layer_axes(loss_fn, params, batch, axes={'kernel': ('fan-in',"
  " 'outputs')})`, with 'layers', 'fan-in' or 'outputs' for each axis."
)


def loss_with_hidden_axes(params, x):
  """A scan over kernels that the unknown primitive returns."""
  kernels = UNHEARD_OF.bind(params["kernel"])
  x, _ = jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, kernels)
  return jnp.sum(x @ params["head"])


def loss_that_scans_first(params, x):
  """A scan whose layers pass their kernels to the unknown primitive."""
  x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ UNHEARD_OF.bind(w)), None), x, params["kernel"])
  return jnp.sum(x @ params["head"])


def described(**kwargs):
  return optax_boost.layer_axes(loss_with_hidden_axes, STACKED, X, **kwargs)


def test_a_description_names_the_primitive_that_hides_the_axes_of_a_leaf():
  assert str(described()) == "head: fan-in (0,), outputs (1,)\nkernel: unknown after unheard_of"


def test_a_primitive_in_which_a_leaf_meets_data_is_also_named():
  params = {"decay": jnp.ones((4, 4)), "kernel": jnp.ones((4, 1))}

  def loss_fn(params, x):
    return jnp.sum(jax.lax.linalg.triangular_solve(params["decay"], x) @ params["kernel"])

  layers = optax_boost.layer_axes(loss_fn, params, X)
  assert dict(zip(layers.paths, layers.unknown_primitives, strict=True)) == {
    "decay": ("triangular_solve",),
    "kernel": (),
  }


def test_a_primitive_is_not_named_if_another_use_shows_the_axes():
  params = {"w": jnp.ones((4, 4))}
  layers = optax_boost.layer_axes(
    lambda p, x: jnp.sum(x @ p["w"]) + jnp.sum(UNHEARD_OF.bind(p["w"])), params, X
  )
  assert layers.axes[0].fan_in == (0,)
  assert layers.unknown_primitives == ((),)


def traced_update(tx):
  """A step that is traced alone: warnings don't depend on numbers."""
  jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), STACKED)


METHODS = {
  "lars": lambda layers: optax_boost.lars(0.1, layers=layers),
  "centralize": lambda layers: optax_boost.centralize(layers=layers),
  "sgperm": lambda layers: optax_boost.sgperm(alpha_min=0.2, method="rank", layers=layers),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_names_the_primitive_in_a_warning(name):
  tx = METHODS[name](described())
  with pytest.warns(
    UserWarning, match=f"{NAMED} Until then, `{name}` goes by the names and shapes"
  ):
    traced_update(tx)


@pytest.mark.parametrize(
  "params", [jnp.ones((4, 4)), {"w": jnp.ones((4, 4)), "b": {"w": jnp.ones(1)}}, {"(w)": X.T}]
)
def test_the_pattern_in_the_warning_selects_the_leaf_alone(params):
  def loss_fn(params, x):
    *rest, w = jax.tree.leaves(params)
    return jnp.sum(x @ UNHEARD_OF.bind(w)) + sum(map(jnp.sum, rest))

  warning = optax_boost.layer_axes(loss_fn, params, X).explain_unknown(_paths.leaf_paths(params))
  pattern = re.search(r"axes=\{'(.*)': ", warning)[1]
  *rest, selected = jax.tree.leaves(optax_boost.path_mask(pattern)(params))
  assert [selected, *rest] == [True] + [False] * len(rest)


@pytest.mark.parametrize("name", ["lars", "centralize"])
def test_a_method_does_not_warn_of_a_leaf_that_it_leaves_alone(name):
  factories = {"lars": lambda **kwargs: optax_boost.lars(0.1, **kwargs)}
  factory = factories.get(name, optax_boost.centralize)
  traced_update(factory(layers=described(), exclude=["kernel"]))


def test_the_train_step_warns_once_of_the_primitive():
  tx = optax.chain(optax_boost.centralize(), optax.sgd(0.1))
  step = optax_boost.make_train_step(loss_with_hidden_axes, tx)
  state = step.init(STACKED)
  with pytest.warns(UserWarning, match=NAMED):
    state, _ = step(state, X)
  # Warnings are errors in the tests.
  step(state, X[:1])


def test_a_method_that_finds_nothing_to_do_says_why():
  params = {"scale": jnp.ones((4, 4))}
  layers = optax_boost.layer_axes(lambda p, x: jnp.sum(x @ UNHEARD_OF.bind(p["scale"])), params, X)
  message = "finds no kernel to centralize. .* does not tell the axes of 'scale' after `unheard_of`"
  with pytest.warns(optax_boost.NoEffectWarning, match=message):
    optax_boost.centralize(layers=layers).init(params)


def test_groups_by_layers_warn_of_the_primitive_that_hides_the_layers():
  with pytest.warns(optax_boost.NoEffectWarning, match=f"no leaf that holds many layers.* {NAMED}"):
    optax_boost.dim_reduce(lambda params: None, groups=described())


def test_the_axis_that_a_scan_slices_is_kept_if_the_layers_hide_their_own_axes():
  layers = optax_boost.layer_axes(loss_that_scans_first, STACKED, X)
  assert str(layers).endswith("kernel: layers (0,), unknown (1, 2) after unheard_of")
  # LARS needs no more, so it does not warn; warnings are errors.
  traced_update(optax_boost.lars(0.1, layers=layers))
  tx = optax_boost.centralize(layers=layers)
  with pytest.warns(UserWarning, match=NAMED):
    updates, _ = tx.update(GRADS, tx.init(STACKED))
  expected = GRADS["kernel"] - GRADS["kernel"].mean(axis=1, keepdims=True)
  np.testing.assert_allclose(updates["kernel"], expected, rtol=0, atol=4 * EPS)


def test_axes_that_the_user_says_replace_those_of_the_trace_and_end_the_warning():
  layers = described(axes={"kernel": ("layers", "outputs", "fan-in"), "head": ("outputs",) * 2})
  assert str(layers) == "head: outputs (0, 1)\nkernel: layers (0,), fan-in (2,), outputs (1,)"
  tx = optax_boost.centralize(layers=layers)
  updates, _ = tx.update(GRADS, tx.init(STACKED))
  expected = GRADS["kernel"] - GRADS["kernel"].mean(axis=2, keepdims=True)
  np.testing.assert_allclose(updates["kernel"], expected, rtol=0, atol=4 * EPS)
  np.testing.assert_array_equal(updates["head"], GRADS["head"])


@pytest.mark.parametrize(
  ("axes", "error", "message"),
  [
    ({"kernel": ("layers", "inputs", "outputs")}, ValueError, "each of the 3 axes of 'kernel'"),
    ({"kernel": ("fan-in", "outputs")}, ValueError, "each of the 3 axes of 'kernel'"),
    ({"kernel": "layers"}, ValueError, "each of the 3 axes of 'kernel'"),
    ({"kernel": (0, 1, 2)}, ValueError, "'layers', 'fan-in' or 'outputs' for each"),
    ({"kernel": 3}, ValueError, "'layers', 'fan-in' or 'outputs' for each"),
    (("layers",), TypeError, "must be a dict from patterns"),
    ({"(": ("layers",)}, ValueError, "a regular expression, but patterns are globs"),
  ],
)
def test_axes_that_are_none_say_what_they_must_be(axes, error, message):
  with pytest.raises(error, match=message):
    described(axes=axes)


def test_axes_of_no_leaf_are_warned_of():
  with pytest.warns(optax_boost.NoEffectWarning, match="kernle"):
    described(axes={"kernle": ("layers", "fan-in", "outputs")})


def test_one_entry_in_the_table_teaches_a_primitive(monkeypatch):
  monkeypatch.setitem(_primitives.RULES, "unheard_of", _primitives.ENTRYWISE)
  layers = described()
  assert layers.axes[layers.paths.index("kernel")].stacked == (0,)
  assert "unknown" not in str(layers)
