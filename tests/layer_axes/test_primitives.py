"""Each elementwise primitive of the installed JAX has a rule, and keeps the axes of a kernel."""

import contextlib
import functools
import inspect
import itertools

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives
import jax.numpy as jnp
import pytest

import optax_boost
from optax_boost._trace import _jaxpr, _primitives

SHAPE = (2, 3)
DTYPES = ("float32", "int32", "complex64", "bool")


def equations(program):
  for equation in getattr(program, "jaxpr", program).eqns:
    inner = list(_jaxpr.sub_jaxprs(equation))
    yield from itertools.chain.from_iterable(map(equations, inner)) if inner else [equation]


def traced(function, shape, arity):
  """The equations of a function of `arity` arrays; empty if it takes no such arrays."""
  for dtype in DTYPES:
    arrays = [jax.ShapeDtypeStruct(shape, dtype)] * arity
    with contextlib.suppress(Exception):
      return list(equations(jax.make_jaxpr(function)(*arrays)))
  return []


def functions():
  """The public functions of one to three arrays, with the number of arrays."""
  yield functools.partial(checkpoint_name, name="weight"), 1
  for name, function in vars(jax.lax).items():
    if inspect.isfunction(function) and not name.startswith("_"):
      arguments = inspect.signature(function).parameters.values()
      required = [a for a in arguments if a.default is a.empty and a.kind is not a.KEYWORD_ONLY]
      if 1 <= len(required) <= 3:
        yield function, len(required)
  for primitive in (p for name, p in vars(primitives).items() if name.endswith("_p")):
    # No leaf enters the primitives that make random numbers of keys.
    is_random = primitive.name.startswith(("random_", "threefry"))
    if not is_random and primitive.name not in _primitives.RULES:
      yield from ((primitive.bind, arity) for arity in (1, 2, 3))


def is_of_arrays(equation):
  """Whether there is a result, and all operands and results are scalars or of `SHAPE`."""
  shapes = [getattr(x.aval, "shape", None) for x in (*equation.invars, *equation.outvars)]
  return bool(equation.outvars) and set(shapes) <= {(), SHAPE}


def elementwise_primitives():
  """The primitives of the functions that take scalars, and arrays of any one shape."""
  names = set()
  for function, arity in functions():
    # Functions of an axis fail on scalars.
    of_scalars = {equation.primitive.name for equation in traced(function, (), arity)}
    of_arrays = traced(function, SHAPE, arity) if of_scalars else []
    names |= of_scalars & {equation.primitive.name for equation in filter(is_of_arrays, of_arrays)}
  return names


def test_each_elementwise_primitive_of_this_jax_has_a_rule():
  found = elementwise_primitives()
  # Proof that the search finds such primitives.
  assert found >= {
    "add",
    "bessel_i1e",
    "clamp",
    "complex",
    "name",
    "nextafter",
    "shift_left",
    "tanh",
  }
  rules = _primitives.RULES
  known = {name for name in found if name in rules and rules[name].is_entrywise}
  assert found - known == set()


@pytest.mark.parametrize(
  "rewrite",
  [
    lambda w: checkpoint_name(w, "weight"),
    lambda w: jnp.real(w * jnp.exp(0.3j)),
    lambda w: jax.lax.imag(jnp.conj(jax.lax.complex(w, w))),
    lambda w: jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(w, "int32") | 1, "float32"),
    lambda w: jax.lax.nextafter(w, 1.0),
    lambda w: jax.lax.digamma(w),
    lambda w: jnp.stack(jnp.unstack(w[None])[:1])[0],
    lambda w: w.at[0].set(0.0),
    lambda w: w.at[:, 1].multiply(2.0),
    lambda w: w.at[jnp.diag_indices(4)].add(1.0),
    lambda w: jax.lax.dynamic_update_slice(w, jnp.zeros((1, 4)), (2, 0)),
    lambda w: jnp.zeros((8, 4)).at[:8].set(w),
  ],
)
def test_a_rewritten_kernel_keeps_its_axes_in_a_layer_and_in_layers_of_a_scan(rewrite):
  params = {"one": jnp.ones((8, 4)), "many": jnp.ones((3, 8, 4))}

  def loss_fn(p, x):
    layer = lambda h, w: (jnp.tanh(h @ rewrite(w) @ jnp.ones((4, 8))), None)  # noqa: E731
    return jnp.sum(jax.lax.scan(layer, x, p["many"])[0] @ rewrite(p["one"]))

  expected = "many: layers (0,), fan-in (1,), outputs (2,)\none: fan-in (0,), outputs (1,)"
  assert str(optax_boost.layer_axes(loss_fn, params, jnp.ones((2, 8)))) == expected
