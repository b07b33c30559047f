"""Errors and warnings advise only arguments that exist."""

import ast
import inspect
import pathlib
import re

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import pytest

import optax_boost
import optax_boost.linen
import optax_boost.nnx

SOURCES = sorted(pathlib.Path(optax_boost.__file__).parent.rglob("*.py"))
# Arguments of functions of JAX, optax, Flax and matplotlib that messages speak of.
LIBRARY_ARGUMENTS = {"check_vma", "hyperparam_dtype", "static_args", "wrt", "to"}
# Arguments of `_protocol.declares`, which a message names to the author of a wrapper.
DECLARATION_ARGUMENTS = {"outcome"}
# An argument with a value, as in "Pass has_aux=True", or one that a message says to pass.
ADVISED = re.compile(r"(?<![\w.'\"])([a-z_]+)=(?=[\w.\[('\"]|\.\.\.)|[Pp]ass `([a-z_]+)[`=(]")


def public_arguments():
  """The parameters of all public functions, classes and methods."""
  modules = [optax_boost, optax_boost.nnx, optax_boost.linen]
  functions = [getattr(m, n) for m in modules for n in m.__all__]
  for step in (optax_boost.TrainStep, type(optax_boost.nnx.make_train_step(len))):
    functions += [value for _, value in inspect.getmembers(step, callable)]
  functions += [value for _, value in inspect.getmembers(optax_boost.Subspace, callable)]
  names = set()
  for function in functions:
    try:
      names |= {*inspect.signature(function).parameters}
    except (TypeError, ValueError):
      continue
  return names


def messages(path):
  """The texts that a module raises or warns of, with their lines."""
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
    is_warning = isinstance(node, ast.Call) and "warn" in ast.unparse(node.func)
    if isinstance(node, ast.Raise) or is_warning:
      texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
      yield node.lineno, "".join(text for text in texts if isinstance(text, str))


def test_every_advised_argument_exists():
  known = public_arguments() | LIBRARY_ARGUMENTS | DECLARATION_ARGUMENTS
  unknown = {
    f"{path.name}:{line}: {name}"
    for path in SOURCES
    for line, text in messages(path)
    for names in ADVISED.findall(text)
    for name in names
    if name and name not in known
  }
  assert not unknown


@pytest.mark.parametrize("form", ["nnx", "linen"])
def test_statistics_of_batches_without_a_common_length_are_estimated_as_the_error_advises(form):
  batches = [{"x": jnp.array([[0.0], [2.0]]), "t": 1.0}, {"x": jnp.array([[3.0]]), "t": 1.0}]

  def forward(model, batch):
    return model(batch["x"])

  def estimate(**more):
    if form == "nnx":
      model = optax_boost.nnx.estimate_batch_stats(
        nnx.BatchNorm(1, rngs=nnx.Rngs(0)), batches, forward_fn=forward, **more
      )
      return model.mean
    module = nn.BatchNorm(use_running_average=False)
    variables = module.init(jax.random.key(0), batches[0]["x"])
    made = optax_boost.linen.estimate_batch_stats(
      module, variables, batches, forward_fn=forward, **more
    )
    return made["batch_stats"]["mean"]

  with pytest.raises(ValueError, match=r"`estimate_batch_stats` can't tell.*Pass `weight_fn`"):
    estimate()
  # The first batch has two examples with the mean 1, the second has one example of 3.
  assert jnp.allclose(jnp.asarray(estimate(weight_fn=lambda b: len(b["x"]))[0]), 5 / 3)
