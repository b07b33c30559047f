"""A primitive that the analysis does not know is named, and one entry in a table teaches it."""

import re

import jax
import jax.extend
from jax.interpreters import ad, mlir
import jax.numpy as jnp
import optax
import pytest

import optax_boost
from optax_boost._trace import _primitives

# A primitive of no program but these, so no rule for a real one can end its being unknown. It
# reverses all axes, so it is its own transpose.
UNHEARD_OF = jax.extend.core.Primitive("unheard_of")
UNHEARD_OF.def_abstract_eval(lambda x: x)
ad.deflinear2(UNHEARD_OF, lambda cotangent, x: [UNHEARD_OF.bind(cotangent)])
mlir.register_lowering(UNHEARD_OF, mlir.lower_fun(jnp.flip, multiple_results=False))

X = jnp.ones((2, 4))
STACKED = {"kernel": jnp.ones((3, 4, 4)), "head": jnp.ones((4, 1))}
NAMED = re.escape(
  "A trace of the loss does not tell the axes of 'kernel': there is no rule for the primitives that"
  " these leaves enter, `unheard_of`. Add one to `optax_boost._trace._primitives.RULES`."
)


def loss_with_hidden_axes(params, x):
  """A scan over kernels that the unknown primitive returns."""
  kernels = UNHEARD_OF.bind(params["kernel"])
  x, _ = jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, kernels)
  return jnp.sum(x @ params["head"])


def described():
  return optax_boost.layer_axes(loss_with_hidden_axes, STACKED, X)


def test_a_description_names_the_primitive_that_hides_the_axes_of_a_leaf():
  assert str(described()) == "head: fan-in (0,), outputs (1,)\nkernel: unknown after unheard_of"


def test_a_primitive_in_which_a_leaf_meets_data_is_also_named():
  params = {"decay": jnp.ones((2, 4)), "kernel": jnp.ones((4, 1))}

  def loss_fn(params, x):
    return jnp.sum(jax.lax.igamma(jnp.exp(params["decay"]), jnp.exp(x)) @ params["kernel"])

  layers = optax_boost.layer_axes(loss_fn, params, X)
  assert dict(zip(layers.paths, layers.unknown_primitives, strict=True)) == {
    "decay": ("igamma",),
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
  with pytest.warns(UserWarning, match=f"{NAMED} `{name}` takes each of these leaves for one"):
    traced_update(tx)


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
  message = "finds no kernel to centralize. .* there is no rule for .* `unheard_of`"
  with pytest.warns(optax_boost.NoEffectWarning, match=message):
    optax_boost.centralize(layers=layers).init(params)


def test_groups_by_layers_warn_of_the_primitive_that_hides_the_layers():
  with pytest.warns(optax_boost.NoEffectWarning, match=f"no leaf that holds many layers.* {NAMED}"):
    optax_boost.dim_reduce(lambda params: None, groups=described())


def test_one_entry_in_the_table_teaches_a_primitive(monkeypatch):
  monkeypatch.setitem(_primitives.RULES, "unheard_of", _primitives.ENTRYWISE)
  layers = described()
  assert layers.axes[layers.paths.index("kernel")].stacked == (0,)
  assert "unknown" not in str(layers)
