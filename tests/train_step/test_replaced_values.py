"""Values that the gradient replaces: the scales and histories of Flax's fp8 layers.

The reference is Flax's own loop: the gradient of the collection becomes the collection.
"""

import functools
import warnings

from flax import linen as nn, nnx, traverse_util
from flax.nnx.bridge import variables as bridge
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost import linen
import optax_boost.nnx

pytestmark = pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated")

NAME = "_overwrite_with_gradient"
X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)
KEY = jax.random.key(1)
# A rounding to eight bits may fall to the other side in another program.
TOLERANCE = 0.02


class Einsum(nn.Module):
  """A layer that multiplies by ``Fp8Einsum``."""

  features: int

  @nn.compact
  def __call__(self, x):
    shape = (x.shape[-1], self.features)
    kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
    return nn.Fp8Einsum()("ni,ij->nj", x, kernel)


def dense(op, dtype=None):
  return lambda features, **kwargs: nn.Dense(features, dot_general_cls=op, dtype=dtype, **kwargs)


LAYERS = {
  "dot_general": dense(nn.Fp8DotGeneralOp),
  "direct": dense(nn.Fp8DirectDotGeneralOp),
  "nanoo": dense(nn.NANOOFp8DotGeneralOp),
  "einsum": Einsum,
}
every_layer = pytest.mark.parametrize("layer", LAYERS)


class Network(nn.Module):
  layer: type = LAYERS["direct"]

  @nn.compact
  def __call__(self, x):
    return self.layer(4, name="head")(nn.relu(self.layer(8, name="body")(x)))


def mean_square(model, x):
  return jnp.mean((model(x) - 1) ** 2)


def flax_loop(module, variables, steps=3, rate=0.1, scale=1.0, trained=("body", "head"), x=X):
  """Flax's own loop, with a static loss scale: the params alone are divided by it."""
  gradient = jax.jit(jax.grad(lambda v: scale * mean_square(lambda x: module.apply(v, x), x)))
  for _ in range(steps):
    g = gradient(variables)

    def move(p, d):
      return p - rate * d / scale

    moved = {
      name: jax.tree.map(move, p, g["params"][name]) if name in trained else p
      for name, p in variables["params"].items()
    }
    variables = {"params": moved, NAME: g[NAME]}
  return variables


def start(module, variables, tx, loss_fn=mean_square, **options):
  loss, params, model_state = linen.split_loss(loss_fn, module, variables)
  step = optax_boost.make_train_step(loss, tx, **options)
  return step, step.init(params, model_state)


def assert_close(got, want):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * np.abs(b).max())


def assert_equal(got, want):
  jax.tree.map(np.testing.assert_array_equal, got, want)


@every_layer
def test_a_linen_step_writes_the_new_values_as_the_loop_of_flax(layer):
  module = Network(LAYERS[layer])
  variables = module.init(KEY, X)
  step, state = start(module, variables, optax.sgd(0.1))
  for _ in range(3):
    state, _ = step(state, X)
  want = flax_loop(module, variables)
  assert_close(state.params, want["params"])
  assert_close(state.model_state[NAME], want[NAME])
  scales = [v for p, v in jax.tree.leaves_with_path(state.model_state[NAME]) if "scale" in str(p)]
  assert not any(scale == 1 for scale in scales)


@every_layer
def test_an_nnx_step_writes_the_new_values_as_the_loop_of_flax(layer):
  module = Network(LAYERS[layer])
  variables = module.init(KEY, X)
  model = nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(X)
  nnx.update(model, nnx.state(bridge.linen_vars_to_nnx_attrs(variables)))
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(mean_square)
  for _ in range(3):
    step(model, optimizer, X)
  want = flax_loop(module, variables)
  got = nnx.to_pure_dict(nnx.state(model))
  for name in ("body", "head"):
    values = {key: got[name][key] for key in want[NAME][name]}
    assert_close(values, want[NAME][name])
    assert_close({key: got[name][key] for key in want["params"][name]}, want["params"][name])


def test_the_loss_scale_divides_gradients_and_not_the_new_values():
  module = Network()
  variables = module.init(KEY, X)
  step, state = start(module, variables, optax_boost.dynamic_loss_scale(optax.sgd(0.1), 1024.0))
  for _ in range(3):
    state, _ = step(state, X)
  want = flax_loop(module, variables, scale=1024.0)
  assert_close(state.params, want["params"])
  assert_close(state.model_state[NAME], want[NAME])


def test_a_skipped_step_and_a_dropped_micro_batch_change_no_value():
  module = Network()
  variables = module.init(KEY, X)
  bad = X.at[0].set(jnp.nan)
  for tx in (
    optax_boost.dynamic_loss_scale(optax.sgd(0.1), 8.0),
    optax_boost.accumulate(optax_boost.dynamic_loss_scale(optax.sgd(0.1), 8.0), 2),
  ):
    step, state = start(module, variables, tx, donate=False)
    after, _ = step(state, X)
    skipped, metrics = step(after, bad)
    assert metrics["skipped/loss"] == 1
    assert_equal(skipped.model_state, after.model_state)
    assert_close(after.model_state[NAME], flax_loop(module, variables, 1, scale=8.0)[NAME])


def test_an_overflow_that_the_quantization_clips_skips_the_step():
  module = dense(nn.Fp8DirectDotGeneralOp, jnp.float16)(4, use_bias=False)
  x = X / 1000
  variables = module.init(KEY, x)

  def loss_fn(model, x):
    return 64 * jnp.mean((model(x).astype(jnp.float32) - 1) ** 2)

  scaled = jax.grad(lambda v: 2.0**24 * loss_fn(lambda x: module.apply(v, x), x))(variables)
  assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(scaled["params"]))
  assert not all(np.all(np.isfinite(v)) for v in jax.tree.leaves(scaled[NAME]))
  tx = optax_boost.dynamic_loss_scale(optax.sgd(1.0), 2.0**24)
  step, state = start(module, variables, tx, loss_fn, donate=False)
  after, metrics = step(state, x)
  assert metrics["skipped/gradients"] == 1
  assert_equal(after.model_state, state.model_state)
  assert_equal(after.params, state.params)


@pytest.mark.parametrize("traced", [False, True])
def test_values_of_frozen_layers_do_not_change(traced):
  module = Network()
  variables = module.init(KEY, X)
  calibrated = flax_loop(module, variables, 1)
  tx = optax_boost.freeze_layers(optax.sgd(0.1), ["body", "head"], optax_boost.fixed_freezing(2, 1))
  step, state = start(module, calibrated, tx, donate=False)
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", optax_boost.NoEffectWarning)
    after, _ = (jax.jit(step) if traced else step)(state, X)
  want = flax_loop(module, calibrated, 1, trained=("head",))
  assert_equal(after.model_state[NAME]["body"], state.model_state[NAME]["body"])
  assert_close(after.model_state[NAME]["head"], want[NAME]["head"])
  assert_close(after.params, want["params"])


def test_values_of_frozen_layers_change_if_statistics_are_not_held():
  module = Network()
  variables = module.init(KEY, X)
  tx = optax_boost.freeze_layers(optax.sgd(0.1), ["body", "head"], optax_boost.fixed_freezing(2, 1))
  step, state = start(module, variables, tx, hold_frozen_statistics=False)
  for _ in range(3):
    state, _ = step(state, X)
  want = flax_loop(module, variables, trained=("head",))
  assert_close(state.model_state[NAME], want[NAME])
  assert_close(state.params, want["params"])


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    return x + LAYERS["direct"](8, name="dense")(nn.tanh(x)), None


class Stack(nn.Module):
  @nn.compact
  def __call__(self, x):
    blocks = nn.scan(
      Block, variable_axes={"params": 0, NAME: 0}, split_rngs={"params": True}, length=4
    )
    return LAYERS["direct"](2, name="head")(blocks(name="blocks")(x, None)[0])


def test_values_of_the_frozen_layers_of_a_scan_do_not_change():
  module = Stack()
  variables = module.init(KEY, X)
  variables = flax_loop(module, variables, 1, trained=("blocks", "head"))
  loss, params, model_state = linen.split_loss(mean_square, module, variables)
  groups = optax_boost.layer_groups(params, ["blocks[*]", "head"])
  tx = optax_boost.freeze_layers(
    optax.sgd(0.1), groups, optax_boost.fixed_freezing(len(groups.groups), 2)
  )
  step = optax_boost.make_train_step(loss, tx, donate=False)
  state = step.init(params, model_state)
  after, _ = step(state, X)
  want = flax_loop(module, variables, 1, trained=("blocks", "head"))
  first, last = [(lambda leaf, part=part: leaf[part]) for part in (slice(0, 2), slice(2, 4))]
  values = [s.model_state[NAME]["blocks"] for s in (state, after)]
  assert_equal(*(jax.tree.map(first, v) for v in values))
  assert_close(jax.tree.map(last, values[1]), jax.tree.map(last, want[NAME]["blocks"]))
  kernel = after.params["blocks"]["dense"]["kernel"]
  assert_equal(kernel[:2], state.params["blocks"]["dense"]["kernel"][:2])
  assert_close(kernel[2:], want["params"]["blocks"]["dense"]["kernel"][2:])


def test_values_that_the_loss_does_not_use_keep_their_values():
  class TwoHeads(nn.Module):
    @nn.compact
    def __call__(self, x, head=None):
      heads = [LAYERS["direct"](2, name=name)(x) for name in ("one", "two")]
      return heads[0] if head is None else heads[head]

  module = TwoHeads()
  variables = module.init(KEY, X)
  step, state = start(module, variables, optax.sgd(0.1), donate=False)
  after, _ = step(state, X)
  assert_equal(after.model_state[NAME]["two"], state.model_state[NAME]["two"])
  assert not np.array_equal(
    *(jax.tree.leaves(s.model_state[NAME]["one"])[0] for s in (state, after))
  )


flatten = functools.partial(traverse_util.flatten_dict, sep="/")
unflatten = functools.partial(traverse_util.unflatten_dict, sep="/")
same = lambda tree: tree  # noqa: E731
# How the params and the model state are arranged, and how a loss gets the model state back.
ARRANGEMENTS = {
  "nested": (same, same, same),
  "joined names": (flatten, flatten, unflatten),
  "in a tuple": (same, lambda state: (state, jnp.ones(())), lambda state: state[0]),
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_values_of_several_modules_are_written_and_held_with_their_module(arrangement):
  of_params, of_state, state_of = ARRANGEMENTS[arrangement]
  module, names = Network(), ("one", "two")
  variables = module.init(KEY, X)
  variables = flax_loop(module, variables, 1)

  def loss_fn(params, model_state, x):
    params = unflatten(params) if arrangement == "joined names" else params
    values = state_of(model_state)
    models = [
      functools.partial(module.apply, {"params": params[name], **values[name]}) for name in names
    ]
    return sum(mean_square(model, x) for model in models), model_state

  tx = optax_boost.freeze_layers(
    optax.sgd(0.1), ["one/**", "two/**"], optax_boost.fixed_freezing(2, 1)
  )
  step = optax_boost.make_train_step(loss_fn, tx, has_model_state=True, donate=False)
  state = step.init(
    of_params({name: variables["params"] for name in names}),
    of_state({name: {NAME: variables[NAME]} for name in names}),
  )
  after, _ = step(state, X)
  want = flax_loop(module, variables, 1)
  assert_close(after.params, of_params({"one": variables["params"], "two": want["params"]}))
  values = {"one": {NAME: variables[NAME]}, "two": {NAME: want[NAME]}}
  assert_close(after.model_state, of_state(values))


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: {"net": v}], ids=["one module", "several"])
def test_the_collection_among_the_params_is_an_error(wrap):
  module = Network()
  step = optax_boost.make_train_step(lambda v, x: jnp.mean(module.apply(v, x)), optax.sgd(0.1))
  with pytest.raises(TypeError, match=f"'{NAME}', too.*split_loss"):
    step.init(wrap(module.init(KEY, X)))
