"""Per-layer methods on the layouts of public language models, with their layers scanned or not."""

import functools

import chex
from flax import nnx
import jax
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost._foundation import _paths
import optax_boost.linen as ob_linen
import optax_boost.nnx as ob_nnx
from tests.freeze_layers import test_freezing
from tests.layer_axes import public_layouts
from tests.layer_axes.public_layouts import LAYERS, TOKENS

# Its programs compile faster than those of JAX's default generator.
KEY = jax.random.key(3, impl="unsafe_rbg")


def loss_of_model(model, tokens, *rngs):
  return public_layouts.next_token_loss(model(tokens, *rngs), tokens)


# By name: the model, how its layers are written, the prefix of their leaves' paths, and the axis of
# layers, None where they are written out.
LAYOUTS = {
  "lm1b": (public_layouts.TransformerLM, "layers", "decoder/encoderdecoderblock_", None),
  "lm1b scan": (public_layouts.TransformerLM, "scan", "decoder/encoderdecoder/", 1),
  "lm1b remat_scan": (public_layouts.TransformerLM, "remat_scan", "decoder/encoderdecoder/", 0),
  "gemma": (public_layouts.Transformer, "layers", "layers/", None),
  "gemma scan": (public_layouts.Transformer, "scan", "layers/", 0),
  "gemma pairs": (public_layouts.Transformer, "pairs", "layers/", 0),
}


class Traced:
  """A layout, its params and its losses."""

  def __init__(self, name, dropout):
    make, form, self.prefix, self.axis = LAYOUTS[name]
    self.is_nnx = make is public_layouts.Transformer
    self.units = LAYERS // 2 if form == "remat_scan" else LAYERS
    if self.is_nnx:
      self.model = nnx.eval_shape(lambda: make(form, nnx.Rngs(0)))
      nnx.update(self.model, public_layouts.filled(nnx.state(self.model, nnx.Param)))
      self.split = ob_nnx.split_loss(
        lambda model, tokens: loss_of_model(model, tokens, nnx.Rngs(KEY)), self.model
      )
      self.args = (TOKENS,)
    else:
      self.model = make(form)
      self.variables = public_layouts.filled(jax.eval_shape(self.model.init, KEY, TOKENS))
      self.split = ob_linen.split_loss(loss_of_model, self.model, self.variables)
      self.args = (TOKENS, KEY) if dropout else (TOKENS,)
    loss, self.params, state = self.split
    self.loss = lambda params: loss(params, state, *self.args)[0]

  def call(self, function, **options):
    """A function of the package on the model's loss."""
    return getattr(optax_boost, function)(*self.split, *self.args, **options)


@functools.cache
def traced(name, dropout=True):
  return Traced(name, dropout)


# The layers of each layout.
NAMES = {
  "lm1b": "decoder/encoderdecoderblock_*",
  "lm1b scan": "decoder/encoderdecoder[:,*]",
  "lm1b remat_scan": "decoder/encoderdecoder[*]",
  "gemma": "layers/*",
  "gemma scan": "layers[*]",
}


@functools.cache
def half(name):
  """Two groups, of which the first has the embedding and the first half of the layers."""
  names = ["shared|embedder", NAMES[name], "*/encoderdecoder_norm|final_norm"]
  return optax_boost.layer_groups(traced(name).params, names, num_groups=2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_stacked_leaves_are_exactly_the_leaves_of_the_layers(name):
  layout = traced(name)
  axes = stacked(layout)
  paths, found = _paths.leaf_paths(layout.params), set(axes)
  expected = {path for path in paths if path.startswith(layout.prefix)}
  assert found == (set() if layout.axis is None else expected)
  assert all(layers[0] == layout.axis for layers in axes.values())


def frozen_half(name, layout, frozen_groups=1):
  """A train step whose first half is frozen, which keeps the gradient in its state; and a state."""
  # Layers that are thawed some day have a gradient in the state, which is zero until then.
  schedule = optax_boost.fixed_freezing(2, frozen_groups, steps=10**6)
  spied = test_freezing.spied(optax.sgd(1.0))
  tx = optax_boost.freeze_layers(spied, half(name), schedule)
  step = optax_boost.make_train_step(lambda params, batch: layout.loss(params), tx, donate=False)
  return step, step.init(layout.params)


def trained_parts(name):
  """What of each leaf is trained while the first half is frozen."""
  layout = traced(name)
  tx = optax_boost.freeze_layers(optax.sgd(1.0), half(name), optax_boost.fixed_freezing(2, 1))
  ones = jax.tree.map(np.ones_like, layout.params)
  updates = jax.device_get(jax.jit(lambda p: tx.update(p, tx.init(p))[0])(ones))
  return jax.tree.map(lambda u: u != 0, updates)


@pytest.mark.parametrize("name", ["lm1b scan"])
def test_the_gradient_of_the_last_half_equals_the_whole_gradient_bit_for_bit(name):
  # Random numbers would be two thirds of the program; test_stacked_freezing draws some in a scan.
  layout = traced(name, dropout=False)
  step, state = frozen_half(name, layout)
  ours = jax.device_get(step(state, ())[0].opt_state.inner_state[0])
  expected = jax.device_get(jax.jit(jax.grad(layout.loss))(layout.params))
  trained = trained_parts(name)
  chex.assert_trees_all_equal(ours, jax.tree.map(lambda t, g: np.where(t, g, 0), trained, expected))
  assert all(np.any(g) for g in jax.tree.leaves(expected))


def matmul_flops(program):
  """Multiplications of a traced program's matrix products, of each step of its scans."""
  total = 0
  for equation in getattr(program, "jaxpr", program).eqns:
    if equation.primitive.name == "dot_general":
      (contracted, _), _ = equation.params["dimension_numbers"]
      shared = [equation.invars[0].aval.shape[axis] for axis in contracted]
      total += int(np.prod([*shared, *equation.outvars[0].aval.shape]))
    inner = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns"))
    times = equation.params["length"] if equation.primitive.name == "scan" else 1
    total += times * sum(matmul_flops(part) for part in inner if hasattr(part, "eqns"))
  return total


# JAX sees the layers of "lm1b" written out, like the layers of "gemma".
@pytest.mark.parametrize("name", ["lm1b remat_scan", "gemma", "gemma scan"])
def test_the_backward_pass_of_the_first_half_is_cut(name):
  layout = traced(name)
  trained = trained_parts(name)
  forward = matmul_flops(jax.make_jaxpr(layout.loss)(layout.params))
  steps = [frozen_half(name, layout, depth) for depth in (1, 0)]
  ours, whole = (matmul_flops(jax.make_jaxpr(functools.partial(*step))(())) for step in steps)
  # The gradients of the tied embedding and of the activations above it are not needed.
  assert 0.45 < (ours - forward) / (whole - forward) < 0.55
  sizes = [x.size for x in jax.tree.leaves(layout.params)]
  parts = [np.mean(t) for t in jax.tree.leaves(trained)]
  assert 0.45 < np.dot(sizes, parts) / sum(sizes) < 0.55


def stacked(layout):
  """The axes of layers of the leaves that have such axes, by path."""
  layers = layout.call("layer_axes")
  axes = zip(layers.paths, layers.axes, strict=True)
  return {path: of_leaf.stacked for path, of_leaf in axes if of_leaf and of_leaf.stacked}
