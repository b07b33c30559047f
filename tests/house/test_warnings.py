"""A warning points to the user's line, so that Python shows it once for each such line."""

import pathlib
import re
import warnings

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_boost
from optax_boost import linen as ob_linen, nnx as ob_nnx

X = jnp.ones((2, 4))
KERNEL = {"kernel": jnp.ones((4, 4))}


def without_effect():
  return optax.chain(optax_boost.centralize(exclude="nowhere"), optax.sgd(0.1))


def in_init():
  optax.chain(optax_boost.lars(0.1, exclude="nowhere"), optax.identity()).init(KERNEL)


def under_jit():
  tx = without_effect()
  jax.jit(tx.update)(KERNEL, tx.init({}), KERNEL)


def in_a_schedule():
  optax_boost.continuous_freezing(4, 0.9)


def in_a_step():
  step = optax_boost.make_train_step(
    lambda params, x: jnp.mean(x @ params["kernel"]), without_effect()
  )
  step(step.init(KERNEL), X)


def in_linen():
  variables = nn.Dense(4).init(jax.random.key(0), X)
  loss, *arrays = ob_linen.split_loss(lambda model, x: jnp.mean(model(x)), nn.Dense(4), variables)
  step = optax_boost.make_train_step(loss, without_effect())
  step(step.init(*arrays), X)


def in_nnx():
  model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, without_effect(), wrt=nnx.Param)
  step = ob_nnx.make_train_step(lambda model, x: jnp.mean(model(x)))
  step(model, optimizer, X)


def in_a_level():
  boost = optax_boost.auto_boost("O1", total_steps=10)
  boost.model(ob_nnx.less_bn, nnx.Linear(4, 2, rngs=nnx.Rngs(0)), X)


@pytest.mark.parametrize(
  "call", [in_init, under_jit, in_a_schedule, in_a_step, in_linen, in_nnx, in_a_level]
)
def test_a_warning_points_to_the_line_that_the_user_wrote(call):
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", UserWarning)
    call()
  lines = [line for *_, line in call.__code__.co_lines() if line]
  assert caught
  for warning in caught:
    assert warning.filename == __file__
    assert min(lines) < warning.lineno <= max(lines)


def test_all_warnings_are_issued_by_one_function():
  package = pathlib.Path(optax_boost.__file__).parent
  issuing = [
    p.name
    for p in package.rglob("*.py")
    if re.search(r"\bstacklevel\b", p.read_text(encoding="utf-8"))
  ]
  assert issuing == ["_warnings.py"]
