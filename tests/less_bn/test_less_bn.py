"""Fewer BatchNorms: what a trace shows of the structure, and the models that come of it."""

import re

import chex
from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.linen as ob_linen
import optax_boost.nnx as ob_nnx
from tests.less_bn.residual_models import (
  LinenBlock,
  LinenNet,
  List,
  NnxBlock,
  NnxNet,
  X,
  filled,
  filled_nnx_net,
)

BOTTLENECK = (1, 3, 1)
BASIC = (3, 3)
INNER = {f"blocks/{b}/norms/{i}" for b in (0, 1) for i in (2, 1)}


def inner(place):
  return place.role == "inner"


def removed_from(make, *args, **options):
  """The BatchNorms that go from an NNX model, without computing any weights."""
  less = ob_nnx.less_bn(nnx.eval_shape(make), *args, **options)
  graph = nnx.iter_graph(less)
  return {"/".join(map(str, path)) for path, node in graph if "Removed" in type(node).__name__}


def variables_of(module, seed=0):
  return filled(jax.eval_shape(module.init, jax.random.key(0), X), seed)


def removed_in(flax, nnx_model, module, **options):
  """The BatchNorms that go, by the paths that NNX has."""
  if flax == "nnx":
    return removed_from(nnx_model, X, **options)
  less = ob_linen.less_bn(module, X, train=True, **options)
  return {re.sub("(blocks|norms|convs)_", r"\1/", path) for path in less.plan.removed}


def places_in(flax, nnx_model, module):
  """The places of all BatchNorms, by the paths that NNX has."""
  places = []
  removed_in(flax, nnx_model, module, predicate=lambda place: places.append(place) or True)
  return {re.sub("(blocks|norms|convs)_", r"\1/", place.path): place for place in places}


@pytest.fixture(params=["nnx", "linen"])
def flax(request):
  return request.param


@pytest.mark.parametrize("pre", [False, True])
def test_each_bottleneck_branch_keeps_only_its_last_batch_norm(flax, pre):
  models = (lambda: NnxNet(pre=pre), LinenNet(pre=pre))
  assert removed_in(flax, *models) == INNER
  places = places_in(flax, *models)
  roles = {"norm9": "outside", "blocks/0/norms/0": "last", "blocks/1/norms/0": "last"}
  roles |= {} if pre else {"blocks/0/bn1": "shortcut"}
  assert {path: p.role for path, p in places.items() if path not in INNER} == roles
  assert {places[path].role for path in INNER} == {"inner"}
  assert {places[path].layers for path in INNER} == {3}


@pytest.mark.parametrize("pre", [False, True])
def test_basic_blocks_are_left_alone_unless_asked(flax, pre):
  models = (lambda: NnxNet(BASIC, pre=pre), LinenNet(BASIC, pre=pre))
  with pytest.warns(optax_boost.NoEffectWarning, match=r"blocks.0.norms.1: inner, 2 layers"):
    assert removed_in(flax, *models) == set()
  assert removed_in(flax, *models, predicate=inner) == {"blocks/0/norms/1", "blocks/1/norms/1"}


class Plain(nnx.Module):
  """Convolutions in a row, with a gelu that adds what stems from one value."""

  def __init__(self, rngs):
    self.convs = List([nnx.Conv(3, 3, (3, 3), rngs=rngs) for _ in range(3)])
    self.norms = List([nnx.BatchNorm(3, rngs=rngs) for _ in range(3)])

  def __call__(self, x):
    for conv, norm in zip(self.convs, self.norms, strict=True):
      x = nnx.gelu(norm(conv(x)))
    return x


def test_a_plain_network_has_nothing_to_remove():
  with pytest.warns(optax_boost.NoEffectWarning, match=r"removes no BatchNorm.*\n.*outside"):
    assert removed_from(lambda: Plain(nnx.Rngs(0)), X) == set()
  with pytest.warns(optax_boost.NoEffectWarning, match=r"BatchNorms:\n  none"):
    ob_linen.less_bn(nn.Dense(2), X)


class Gated(NnxBlock):
  """Squeeze and excitation at the end of the branch."""

  def __init__(self, inputs, outputs, sizes, rngs, drop, pre):
    super().__init__(inputs, outputs, sizes, rngs)
    self.gate = List([nnx.Linear(outputs, outputs, rngs=rngs) for _ in range(2)])

  def __call__(self, x):
    y = x
    for conv, norm in list(zip(self.convs, self.norms, strict=True))[::-1]:
      y = nnx.relu(norm(conv(y)))
    squeezed = jnp.mean(y, (1, 2), keepdims=True)
    y = y * nnx.sigmoid(self.gate[1](nnx.relu(self.gate[0](squeezed))))
    return self.bn1(self.a(x)) + y


def test_the_layers_of_a_gate_do_not_make_a_block_a_bottleneck():
  assert removed_from(lambda: NnxNet(block=Gated), X) == INNER
  places = places_in("nnx", lambda: NnxNet(BASIC, block=Gated), None)
  assert {p.layers for p in places.values() if p.role == "inner"} == {2}


class Stochastic(NnxBlock):
  """Drops its branch at random, inside of `remat` and `jit`, and has a second input."""

  def __init__(self, inputs, outputs, sizes, rngs, drop, pre):
    super().__init__(inputs, outputs, sizes, rngs)
    self.depth = nnx.Dropout(0.5, broadcast_dims=(1, 2, 3), rngs=rngs)

  def __call__(self, x):
    @nnx.jit
    @nnx.remat
    def branch(self, x):
      for i in (2, 1, 0):
        x = nnx.hard_swish(self.norms[i](self.convs[i](x)))
      return self.depth(x)

    return jnp.add(branch(self, x), self.bn1(self.a(x)))


def test_structure_is_seen_through_jit_remat_dropout_and_branching_activations():
  assert removed_from(lambda: NnxNet(block=Stochastic), X) == INNER


class Conditioned(nnx.Module):
  """A block to which another input is added inside."""

  def __init__(self, rngs):
    self.block = NnxBlock(3, 3, BOTTLENECK, rngs)
    self.embed = nnx.Linear(2, 3, rngs=rngs)

  def __call__(self, flag, time, x):
    assert flag == "train"
    return self.block(x + self.embed(time)[:, None, None])


def test_every_input_is_followed():
  removed = removed_from(lambda: Conditioned(nnx.Rngs(0)), "train", jnp.ones((2, 2)), x=X)
  assert removed == {"block/norms/2", "block/norms/1"}


class Scanned(nn.Module):
  remat: bool

  @nn.compact
  def __call__(self, x, train=True):
    def body(block, x, _):
      return block(x, train), None

    block = nn.remat(LinenBlock, static_argnums=(2,)) if self.remat else LinenBlock
    scan = nn.scan(
      body,
      variable_axes={"params": 0, "batch_stats": 0},
      split_rngs={"params": True},
      length=2,
    )
    x, _ = scan(block(3, BOTTLENECK, name="block"), x, None)
    return x


@pytest.mark.parametrize("remat", [False, True])
def test_stacked_layers_lose_their_batch_norms_together(remat):
  module = Scanned(remat)
  less = ob_linen.less_bn(module, X)
  assert set(less.plan.removed) == {"block/norms_2", "block/norms_1"}
  variables = jax.eval_shape(less.init, jax.random.key(0), X)
  norms = [path for path in variables["params"]["block"] if path.startswith("norms")]
  assert norms == ["norms_0"]
  assert variables["params"]["block"]["norms_0"]["scale"].shape == (2, 3)
  jax.eval_shape(lambda v: less.apply(v, X, mutable="batch_stats"), variables)


class Hourglass(nnx.Module):
  """A long skip around two residual blocks and a layer of its own."""

  def __init__(self, rngs):
    self.inside = List([NnxBlock(3, 3, BOTTLENECK, rngs) for _ in range(2)])
    self.conv = nnx.Conv(3, 3, (3, 3), rngs=rngs)
    self.norm = nnx.BatchNorm(3, rngs=rngs)

  def __call__(self, x):
    y = x
    for block in self.inside:
      y = block(y)
    return x + self.norm(self.conv(y))


def test_the_innermost_of_nested_blocks_decides():
  def make():
    return Hourglass(nnx.Rngs(0))

  assert removed_from(make, X) == {f"inside/{b}/norms/{i}" for b in (0, 1) for i in (2, 1)}
  places = places_in("nnx", make, None)
  assert places["norm"].role == places["inside/1/norms/0"].role == "last"


class Shared(nnx.Module):
  """The first BatchNorm of the branch serves the stem too."""

  def __init__(self, rngs):
    self.block = NnxBlock(3, 3, BOTTLENECK, rngs)
    self.block.norms[2] = nnx.BatchNorm(3, rngs=rngs)
    self.block.convs[2] = nnx.Conv(3, 3, (1, 1), rngs=rngs)
    self.block.convs[1] = nnx.Conv(3, 4, (3, 3), rngs=rngs)
    self.stem = self.block.norms[2]

  def __call__(self, x):
    return self.block(self.stem(x))


def test_a_batch_norm_that_is_also_used_elsewhere_stays():
  assert removed_from(lambda: Shared(nnx.Rngs(0)), X) == {"block/norms/1"}


def test_a_removed_module_is_gone_from_every_place_that_refers_to_it():
  model = nnx.eval_shape(lambda: Shared(nnx.Rngs(0)))
  less = ob_nnx.less_bn(model, X, predicate=lambda place: place.role != "last")
  assert less.stem is less.block.norms[2]
  assert type(less.stem).__name__ == "RemovedBatchNorm"


def outputs_in_nnx(model, x):
  """In training and in evaluation, with the statistics after the former."""
  model.train()
  trained = model(x)
  model.eval()
  return trained, model(x), nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))


@pytest.mark.parametrize("pre", [False, True])
def test_the_nnx_copy_equals_the_network_without_batch_norms(pre):
  model = filled_nnx_net(0, lambda: NnxNet(pre=pre))
  before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))
  less = ob_nnx.less_bn(model, X)
  by_hand = filled_nnx_net(1, lambda: NnxNet(pre=pre, drop=True))
  expected = nnx.state(by_hand)
  chex.assert_trees_all_equal_shapes(nnx.state(less), expected)
  nnx.update(by_hand, nnx.state(less))
  chex.assert_trees_all_close(outputs_in_nnx(less, X), outputs_in_nnx(by_hand, X), rtol=1e-5)
  # The original is as it was, and shares no array with the copy.
  chex.assert_trees_all_equal(nnx.to_pure_dict(nnx.state(model)), before)
  for array in jax.tree.leaves(nnx.state(less)):
    array.delete()
  model(X)


@pytest.mark.parametrize("pre", [False, True])
def test_the_linen_module_equals_the_network_without_batch_norms(pre):
  module = LinenNet(pre=pre)
  less = ob_linen.less_bn(module, X)
  by_hand = LinenNet(pre=pre, drop=True)
  variables = variables_of(less)
  expected = jax.eval_shape(by_hand.init, jax.random.key(0), X)
  chex.assert_trees_all_equal_structs(variables, expected)
  for train in (True, False):
    found = less.apply(variables, X, train=train, mutable="batch_stats")
    expected = by_hand.apply(variables, X, train=train, mutable="batch_stats")
    chex.assert_trees_all_close(found, expected, rtol=1e-5)


def test_a_method_of_a_linen_module_is_reached_by_name_and_from_inside():
  less = ob_linen.less_bn(LinenNet(), X)
  variables = variables_of(less)
  features = less.apply(variables, X, method="features")
  chex.assert_trees_all_close(
    less.apply(variables, X), features @ variables["params"]["last"]["kernel"], rtol=1e-5
  )
  chex.assert_trees_all_close(less.apply(variables, X, method=lambda m, x: m.features(x)), features)
  with pytest.raises(AttributeError, match="nonsense"):
    less.nonsense  # noqa: B018


def test_the_last_dense_layer_becomes_a_head_that_keeps_its_weights():
  model = filled_nnx_net(0)
  model.last.bias[...] = jnp.arange(5.0)
  less = ob_nnx.less_bn(model, X, fn_flag=True)
  w, h = model.last.kernel[...], less.features(X)
  cosines = (h / jnp.linalg.norm(h, axis=1)[:, None]) @ (w / jnp.linalg.norm(w, axis=0))
  np.testing.assert_allclose(less(X), cosines + jnp.arange(5.0), rtol=1e-4)
  less.last.multiplier[...] = jnp.full(1, 8.0)
  np.testing.assert_allclose(less(X), 8 * (cosines + jnp.arange(5.0)), rtol=1e-4)
  module = ob_linen.less_bn(LinenNet(), X, fn_flag=True)
  variables = variables_of(module)
  h = module.apply(variables, X, method="features")
  head = ob_linen.NormalizedDense(5)
  expected = head.apply({"params": variables["params"]["last"]}, h)
  np.testing.assert_allclose(module.apply(variables, X), expected, rtol=1e-5)


def test_a_dense_layer_before_other_layers_is_not_taken_for_the_head():
  model = nnx.eval_shape(lambda: NnxNet(block=Gated))
  model.last = nnx.Conv(8, 5, (1,), rngs=nnx.Rngs(0))
  with pytest.warns(optax_boost.NoEffectWarning, match="finds no last dense layer"):
    less = ob_nnx.less_bn(model, X, fn_flag=True)
  assert isinstance(less.last, nnx.Conv)


def test_weights_trained_in_one_copy_fit_another():
  model = ob_nnx.less_bn(filled_nnx_net(0), X, fn_flag=True)
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  step = ob_nnx.make_train_step(lambda model, x: jnp.mean(model(x) ** 2))
  first = step(model, optimizer, X)["loss"]
  assert step(model, optimizer, X)["loss"] < first
  fresh = ob_nnx.less_bn(filled_nnx_net(5), X, fn_flag=True)
  nnx.update(fresh, nnx.state(model))
  fresh.eval()
  model.eval()
  np.testing.assert_array_equal(fresh(X), model(X))


class Auxiliary(nn.Module):
  """In training, a block on the side that evaluation leaves out."""

  @nn.compact
  def __call__(self, x, train=True):
    y = LinenBlock(3, BOTTLENECK, name="main")(x, train)
    return (y, LinenBlock(3, BOTTLENECK, name="side")(x, train)) if train else y


def test_a_call_may_skip_modules_that_the_plan_names():
  less = ob_linen.less_bn(Auxiliary(), X)
  assert len(less.plan.removed) == 4
  variables = jax.eval_shape(less.init, jax.random.key(0), X)
  evaluated = jax.eval_shape(lambda v: less.apply(v, X, train=False), variables)
  assert evaluated.shape == X.shape


def test_on_plan_gets_the_changes_and_the_number_of_batch_norms(flax):
  plans = []
  removed = removed_in(flax, NnxNet, LinenNet(), on_plan=plans.append)
  (plan,) = plans
  assert len(plan.removed) == len(removed) == len(INNER)
  assert (plan.head, plan.norms) == (None, 8)


def test_nothing_is_computed_to_plan():
  abstract = jax.ShapeDtypeStruct(X.shape, X.dtype)
  assert removed_from(NnxNet, abstract) == INNER
  assert len(ob_linen.less_bn(LinenNet(), abstract).plan.removed) == 4


def test_containers_and_dtypes_are_kept():
  data = getattr(nnx, "data", lambda value: value)

  class Holder(nnx.Module):
    def __init__(self, rngs):
      norms = [nnx.BatchNorm(3, dtype=jnp.bfloat16, rngs=rngs) for _ in range(5)]
      self.chain = nnx.Sequential(norms[0], nnx.relu)
      self.own = List([List([norms[1]])])
      self.pair = data((nnx.relu, norms[2]))
      self.named = data({"norm": norms[3]})
      self.several = data([norms[4]])

    def __call__(self, x):
      x = self.own[0][0](self.pair[1](self.chain(x)))
      return self.several[0](self.named["norm"](x))

  model = Holder(nnx.Rngs(0))
  less = ob_nnx.less_bn(model, X, predicate=lambda place: True)
  np.testing.assert_array_equal(less(X), nnx.relu(X.astype(jnp.bfloat16)))
  assert not jax.tree.leaves(nnx.state(less))
  assert isinstance(model.pair[1], nnx.BatchNorm)


class Jitted(nn.Module):
  block: nn.Module = nn.jit(LinenBlock, static_argnums=(2,))(3, BOTTLENECK)

  def __call__(self, x, train=True):
    return self.block(x, train)


def test_refuses_a_module_whose_cached_traces_cannot_be_intercepted():
  less = ob_linen.less_bn(Jitted(), X)
  assert len(less.plan.removed) == 2
  with pytest.raises(ValueError, match=r"remove an `nn.jit` inside of the module"):
    jax.eval_shape(less.init, jax.random.key(0), X)


ABSTRACT = nnx.eval_shape(NnxNet)


def test_a_model_without_inputs_is_refused():
  for less_bn, model in ((ob_nnx.less_bn, ABSTRACT), (ob_linen.less_bn, LinenNet())):
    with pytest.raises(ValueError, match=r"needs the model's inputs, .*; got none"):
      less_bn(model)
    with pytest.raises(ValueError, match=r"needs the model's inputs, .*; got 3, 'x'"):
      less_bn(model, 3, name="x")
