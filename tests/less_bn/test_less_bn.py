"""Fewer BatchNorms: what a trace shows of the structure, and the models that come of it."""

import dataclasses
import functools
import warnings

import chex
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.linen as ob_linen
import optax_boost.nnx as ob_nnx
from tests.less_bn.residual_models import LinenBlock
from tests.less_bn.residual_models import LinenNet
from tests.less_bn.residual_models import List
from tests.less_bn.residual_models import NnxBlock
from tests.less_bn.residual_models import NnxNet
from tests.less_bn.residual_models import X
from tests.less_bn.residual_models import filled
from tests.less_bn.residual_models import filled_nnx_net

BOTTLENECK = (1, 3, 1)
BASIC = (3, 3)
INNER = [f"blocks/{b}/norms/{i}" for b in (0, 1) for i in (2, 1)]


def inner(place):
  return place.role == "inner"


def abstract_plan(make, *args, **options):
  """Plans without computing any weights."""
  return ob_nnx.plan_less_bn(nnx.eval_shape(make), *args, **options)


def variables_of(module, seed=0):
  return filled(jax.eval_shape(module.init, jax.random.key(0), X), seed)


def initial(module, *path):
  """One of the initial params, without computing the others."""

  def init():
    return functools.reduce(dict.__getitem__, path, module.init(jax.random.key(0), X)["params"])

  return jax.jit(init)()


def plan_in(flax, nnx_model, module, **options):
  """The plan, with the paths that NNX has, in the order of the forward pass."""
  if flax == "nnx":
    return abstract_plan(nnx_model, X, **options)
  plan = ob_linen.plan_less_bn(module, X, train=True, **options)

  def renamed(path):
    for name in ("blocks", "norms", "convs"):
      path = path.replace(f"{name}_", f"{name}/")
    return path

  return dataclasses.replace(
    plan,
    places=tuple(dataclasses.replace(p, path=renamed(p.path)) for p in plan.places),
    removed=tuple(map(renamed, plan.removed)),
    biases=tuple(map(renamed, plan.biases)),
  )


@pytest.fixture(params=["nnx", "linen"])
def flax(request):
  return request.param


def test_of_each_bottleneck_branch_only_the_last_batch_norm_stays(flax):
  plan = plan_in(flax, NnxNet, LinenNet())
  assert list(plan.removed) == INNER
  roles = {p.path: p.role for p in plan.places if p.path not in plan.removed}
  assert roles == {
    "norm9": "outside",
    "blocks/0/bn1": "shortcut",
    "blocks/0/norms/0": "last",
    "blocks/1/norms/0": "last",
  }
  assert {p.layers for p in plan.places if p.role in ("inner", "last")} == {3}
  assert plan.biases == ()
  assert plan.head is None


def test_in_a_pre_activation_branch_the_norms_before_its_layers_count(flax):
  plan = plan_in(flax, lambda: NnxNet(pre=True), LinenNet(pre=True))
  assert list(plan.removed) == INNER
  assert [p.path for p in plan.places if p.role == "last"] == [
    "blocks/0/norms/0",
    "blocks/1/norms/0",
  ]
  assert {p.layers for p in plan.places if p.role == "inner"} == {3}


@pytest.mark.parametrize("pre", [False, True])
def test_basic_blocks_are_left_alone_unless_asked(flax, pre):
  models = (lambda: NnxNet(BASIC, pre=pre), LinenNet(BASIC, pre=pre))
  with pytest.warns(optax_boost.NoEffectWarning, match=r"blocks.0.norms.1: inner, 2 layers"):
    assert plan_in(flax, *models).removed == ()
  plan = plan_in(flax, *models, predicate=inner)
  assert list(plan.removed) == ["blocks/0/norms/1", "blocks/1/norms/1"]


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
    plan = abstract_plan(lambda: Plain(nnx.Rngs(0)), X)
  assert {p.role for p in plan.places} == {"outside"}
  with pytest.warns(optax_boost.NoEffectWarning, match=r"BatchNorms:\n  none"):
    ob_linen.plan_less_bn(nn.Dense(2), X)


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


def test_the_layers_of_a_gate_make_no_bottleneck():
  plan = abstract_plan(lambda: NnxNet(block=Gated), X)
  assert list(plan.removed) == INNER
  with pytest.warns(optax_boost.NoEffectWarning):
    plan = abstract_plan(lambda: NnxNet(BASIC, block=Gated), X)
  assert {p.layers for p in plan.places if p.role == "inner"} == {2}


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
  plan = abstract_plan(lambda: NnxNet(block=Stochastic), X)
  assert list(plan.removed) == INNER


class Conditioned(nnx.Module):
  """A block to which another input is added inside."""

  def __init__(self, rngs):
    self.block = NnxBlock(3, 3, BOTTLENECK, rngs)
    self.embed = nnx.Linear(2, 3, rngs=rngs)

  def __call__(self, flag, time, x):
    assert flag == "train"
    return self.block(x + self.embed(time)[:, None, None])


def test_of_several_inputs_each_is_followed():
  plan = abstract_plan(lambda: Conditioned(nnx.Rngs(0)), "train", jnp.ones((2, 2)), x=X)
  assert list(plan.removed) == ["block/norms/2", "block/norms/1"]


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
  assert list(less.plan.removed) == ["block/norms_2", "block/norms_1"]
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


def test_of_nested_blocks_the_innermost_counts():
  plan = abstract_plan(lambda: Hourglass(nnx.Rngs(0)), X)
  assert list(plan.removed) == [f"inside/{b}/norms/{i}" for b in (0, 1) for i in (2, 1)]
  roles = {p.path: p.role for p in plan.places}
  assert roles["norm"] == roles["inside/1/norms/0"] == "last"


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
  plan = abstract_plan(lambda: Shared(nnx.Rngs(0)), X)
  assert list(plan.removed) == ["block/norms/1"]


def test_a_removed_module_is_gone_from_every_place_that_refers_to_it():
  model = nnx.eval_shape(lambda: Shared(nnx.Rngs(0)))
  less = ob_nnx.less_bn(model, X, predicate=lambda place: place.role != "last")
  assert less.stem is less.block.norms[2]
  assert isinstance(less.stem, ob_nnx.RemovedBatchNorm)


def outputs_in_nnx(model, x):
  """In training and in evaluation, with the statistics after the former."""
  model.train()
  trained = model(x)
  model.eval()
  return trained, model(x), nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))


@pytest.mark.parametrize("pre", [False, True])
def test_the_nnx_copy_computes_what_the_network_without_them_does(pre):
  model = filled_nnx_net(0, lambda: NnxNet(pre=pre))
  before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))
  less = ob_nnx.less_bn(model, X)
  by_hand = filled_nnx_net(1, lambda: NnxNet(pre=pre, drop=True))
  report = ob_nnx.load_original(by_hand, model)
  assert report.fresh == ()
  assert len(report.left_over) == 16
  chex.assert_trees_all_close(outputs_in_nnx(less, X), outputs_in_nnx(by_hand, X), rtol=1e-5)
  # The original is as it was, and shares no array with the copy.
  chex.assert_trees_all_equal(nnx.to_pure_dict(nnx.state(model)), before)
  for array in jax.tree.leaves(nnx.state(less)):
    array.delete()
  model(X)


@pytest.mark.parametrize("pre", [False, True])
def test_the_linen_module_computes_what_the_network_without_them_does(pre):
  module = LinenNet(pre=pre)
  less = ob_linen.less_bn(module, X)
  by_hand = LinenNet(pre=pre, drop=True)
  variables, report = ob_linen.load_original(variables_of(less), variables_of(module))
  expected = jax.eval_shape(by_hand.init, jax.random.key(0), X)
  chex.assert_trees_all_equal_structs(variables, expected)
  assert report.fresh == ()
  assert len(report.left_over) == 16
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


class Around(nn.Module):
  """A module with a less_bn'd one inside."""

  less: nn.Module

  @nn.compact
  def __call__(self, x):
    return nn.Dense(2)(self.less(x))


def test_a_linen_module_with_fewer_batch_norms_works_inside_of_another():
  less = ob_linen.less_bn(LinenNet(), X)
  x = jnp.ones_like(X)
  outer = Around(less)
  variables = variables_of(outer)
  inside = {name: tree["less"] for name, tree in variables.items()}
  chex.assert_trees_all_equal_structs(inside, variables_of(less))
  dense = nn.Dense(2).apply({"params": variables["params"]["Dense_0"]}, less.apply(inside, x))
  chex.assert_trees_all_close(outer.apply(variables, x), dense)


def test_the_last_dense_layer_becomes_a_head_that_keeps_its_weights():
  model = filled_nnx_net(0)
  model.last.bias[...] = jnp.arange(5.0)
  less = ob_nnx.less_bn(model, X, fn_flag=True, multiplier=8.0)
  w, h = model.last.kernel[...], less.features(X)
  cosines = (h / jnp.linalg.norm(h, axis=1)[:, None]) @ (w / jnp.linalg.norm(w, axis=0))
  expected = 8 * (cosines + jnp.arange(5.0))
  less = ob_nnx.less_bn(model, X, fn_flag=True, multiplier=8.0)
  np.testing.assert_allclose(less(X), expected, rtol=1e-4)
  plan = ob_linen.plan_less_bn(LinenNet(), X, fn_flag=True, multiplier=8.0)
  module = ob_linen.less_bn(LinenNet(), plan=plan)
  variables = variables_of(module)
  variables["params"]["last"]["multiplier"] = multiplier = initial(module, "last", "multiplier")
  assert multiplier == 8
  h = module.apply(variables, X, method="features")
  head = ob_linen.NormalizedDense(5)
  expected = head.apply({"params": variables["params"]["last"]}, h)
  np.testing.assert_allclose(module.apply(variables, X), expected, rtol=1e-5)


def test_a_dense_layer_with_others_after_it_is_no_head():
  model = nnx.eval_shape(lambda: NnxNet(block=Gated))
  model.last = nnx.Conv(8, 5, (1,), rngs=nnx.Rngs(0))
  with pytest.warns(optax_boost.NoEffectWarning, match="finds no last dense layer"):
    assert ob_nnx.plan_less_bn(model, X, fn_flag=True).head is None


def test_a_bias_takes_the_place_of_a_removed_batch_norm(flax):
  biases = [f"blocks/{b}/convs/{i}" for b in (0, 1) for i in (2, 1)]
  assert list(plan_in(flax, NnxNet, LinenNet(), bias=True).biases) == biases
  pre = plan_in(flax, lambda: NnxNet(pre=True), LinenNet(pre=True), bias=True)
  # The first norm of a pre-activation branch follows no layer of its own.
  assert list(pre.biases) == ["blocks/0/convs/2", "blocks/1/convs/2"]


def test_new_biases_start_at_zero_and_are_trained():
  less = ob_nnx.less_bn(filled_nnx_net(0), X, bias=True)
  np.testing.assert_allclose(less(X), ob_nnx.less_bn(filled_nnx_net(0), X)(X), rtol=1e-5)
  grads = nnx.jit(nnx.grad(lambda model: jnp.sum(model(X) ** 2)))(less)
  assert jnp.any(grads["blocks"][0]["convs"][2]["bias"][...] != 0)
  module = ob_linen.less_bn(LinenNet(), X, bias=True)
  variables = variables_of(module)

  @jax.jit
  @jax.grad
  def gradient(params):
    return jnp.sum(module.apply({**variables, "params": params}, X) ** 2)

  grads = gradient(variables["params"])
  assert not jnp.any(initial(module, "blocks_0", "convs_2", "bias"))
  assert jnp.any(grads["blocks_0"]["convs_2"]["bias"])
  assert "bias" not in variables["params"]["blocks_0"]["convs_0"]


def test_a_checkpoint_of_the_original_loads_with_a_report():
  trained = filled_nnx_net(7)
  plan = abstract_plan(NnxNet, X, fn_flag=True, bias=True)
  less = ob_nnx.less_bn(filled_nnx_net(0), plan=plan)
  report = ob_nnx.load_original(less, nnx.to_pure_dict(nnx.state(trained)))
  assert set(report.left_over) == {
    f"{path}/{leaf}" for path in INNER for leaf in ("bias", "mean", "scale", "var")
  }
  assert report.fresh == (*sorted(f"{path}/bias" for path in plan.biases), "last/multiplier")
  assert "left over in the checkpoint: blocks/0/norms/1/bias" in str(report)
  assert "left as they were: blocks/0/convs/1/bias" in str(report)
  np.testing.assert_array_equal(less.first.kernel[...], trained.first.kernel[...])
  # Its own checkpoint leaves nothing over; the copy can be trained with donation.
  assert ob_nnx.load_original(ob_nnx.less_bn(trained, plan=plan), less).left_over == ()
  report = ob_nnx.load_original(less, nnx.state(trained))
  assert len(report.left_over) == 16


def test_a_state_that_orbax_restored_without_a_target_loads():
  model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
  kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
  restored = {name: {"value": value} for name, value in {"kernel": kernel, "scale": 1.0}.items()}
  report = ob_nnx.load_original(model, restored)
  np.testing.assert_array_equal(model.kernel[...], kernel)
  assert (report.loaded, report.left_over, report.fresh) == (
    ("kernel",),
    ("scale/value",),
    ("bias",),
  )


def test_rng_streams_are_loaded_and_never_missed():
  model = NnxNet(block=Stochastic)
  less = ob_nnx.less_bn(NnxNet(block=Stochastic, rngs=nnx.Rngs(3)), X)
  report = ob_nnx.load_original(less, model)
  assert "blocks/0/depth/rngs/key" in report.loaded
  np.testing.assert_array_equal(
    jax.random.key_data(less.blocks[0].depth.rngs.key[...]),
    jax.random.key_data(model.blocks[0].depth.rngs.key[...]),
  )
  params = nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.BatchStat)))
  assert ob_nnx.load_original(less, params).fresh == ()


def test_what_is_loaded_takes_the_dtype_and_the_sharding_of_its_place():
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  place = jax.device_put(jnp.zeros(4, jnp.bfloat16), sharding)
  loaded, _ = ob_linen.load_original({"params": {"w": place}}, {"params": {"w": np.arange(4.0)}})
  assert loaded["params"]["w"].dtype == jnp.bfloat16
  assert loaded["params"]["w"].sharding == sharding


def test_a_fresh_model_evaluates_what_was_trained():
  """The reference's `network_auto_process_eval`."""
  plan = abstract_plan(NnxNet, X, fn_flag=True)
  model = ob_nnx.less_bn(filled_nnx_net(0), plan=plan)
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  step = ob_nnx.make_train_step(lambda model, x: jnp.mean(model(x) ** 2))
  first = step(model, optimizer, X)["loss"]
  assert step(model, optimizer, X)["loss"] < first
  fresh = ob_nnx.less_bn(filled_nnx_net(5), plan=plan)
  report = ob_nnx.load_original(fresh, nnx.state(model))
  assert report.left_over == report.fresh == ()
  fresh.eval()
  model.eval()
  np.testing.assert_array_equal(fresh(X), model(X))


class Auxiliary(nn.Module):
  """In training, a block on the side that evaluation leaves out."""

  @nn.compact
  def __call__(self, x, train=True):
    y = LinenBlock(3, BOTTLENECK, name="main")(x, train)
    return (y, LinenBlock(3, BOTTLENECK, name="side")(x, train)) if train else y


def test_a_call_may_leave_out_a_part_of_what_the_plan_names():
  less = ob_linen.less_bn(Auxiliary(), X)
  assert len(less.plan.removed) == 4
  variables = jax.eval_shape(less.init, jax.random.key(0), X)
  evaluated = jax.eval_shape(lambda v: less.apply(v, X, train=False), variables)
  assert evaluated.shape == X.shape


def test_the_linen_train_step_takes_the_module():
  module = ob_linen.less_bn(LinenNet(), X, fn_flag=True)
  step = ob_linen.make_train_step(
    lambda model, x: jnp.mean(model(x, train=True) ** 2), module, optax.sgd(0.1)
  )
  state = step.init(variables_of(module))
  state, metrics = step(state, X)
  state, after = step(state, X)
  assert after["loss"] < metrics["loss"]


def test_nothing_is_computed_to_plan():
  abstract = jax.ShapeDtypeStruct(X.shape, X.dtype)
  model = nnx.eval_shape(NnxNet)
  assert list(ob_nnx.plan_less_bn(model, abstract).removed) == INNER
  assert len(ob_linen.plan_less_bn(LinenNet(), abstract).removed) == 4


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


def test_the_plan_prints():
  plan = abstract_plan(NnxNet, X, fn_flag=True, bias=True)
  assert str(plan).splitlines() == [
    "removed 4 of 8 BatchNorms: " + ", ".join(INNER),
    "kept, last of its residual branch: blocks/0/norms/0, blocks/1/norms/0",
    "kept, on a shortcut: blocks/0/bn1",
    "kept, in no residual block: norm9",
    "new biases: blocks/0/convs/2, blocks/0/convs/1, blocks/1/convs/2, blocks/1/convs/1",
    "normalized head: last",
  ]


def test_refuses_what_is_no_model_predicate_or_multiplier():
  with pytest.raises(TypeError, match=r"must be an NNX module; got <flax|got LinenNet"):
    ob_nnx.less_bn(LinenNet(), X)
  with pytest.raises(TypeError, match=r"must be a Linen module"):
    ob_linen.less_bn(nnx.eval_shape(NnxNet), X)
  for refuses, model in ((ob_nnx.less_bn, nnx.eval_shape(NnxNet)), (ob_linen.less_bn, LinenNet())):
    with pytest.raises(TypeError, match=r"`plan` must be what `plan_less_bn` returned; got 'O1'"):
      refuses(model, plan="O1")
  with pytest.raises(TypeError, match=r"`predicate` must be callable, called as `predicate\(place"):
    ob_nnx.less_bn(nnx.eval_shape(NnxNet), X, predicate="norms")
  with pytest.raises(ValueError, match=r"`multiplier` must be finite and > 0"):
    ob_linen.less_bn(LinenNet(), X, multiplier=0.0)


class Jitted(nn.Module):
  block: nn.Module = nn.jit(LinenBlock, static_argnums=(2,))(3, BOTTLENECK)

  def __call__(self, x, train=True):
    return self.block(x, train)


def test_refuses_a_module_whose_cached_traces_cannot_be_intercepted():
  plan = ob_linen.plan_less_bn(Jitted(), X)
  assert len(plan.removed) == 2
  with pytest.raises(ValueError, match=r"If it has `nn.jit` inside, take that off"):
    jax.eval_shape(ob_linen.less_bn(Jitted(), plan=plan).init, jax.random.key(0), X)


def test_refuses_a_plan_or_checkpoint_of_another_architecture():
  plan = abstract_plan(NnxNet, X)
  with pytest.raises(ValueError, match=r"at 'blocks/0/norms/2' it expects a BatchNorm, .* nothing"):
    ob_nnx.less_bn(nnx.eval_shape(lambda: NnxNet(BASIC)), plan=plan)
  linen_plan = ob_linen.plan_less_bn(LinenNet(), X)
  module = ob_linen.less_bn(LinenNet(BASIC), plan=linen_plan)
  with pytest.raises(ValueError, match=r"the module has no 'blocks_0/norms_2'"):
    jax.eval_shape(module.init, jax.random.key(0), X)
  less = ob_nnx.less_bn(filled_nnx_net(0), plan=plan)
  with pytest.raises(ValueError, match=r"'last/bias' has shape \(3,\), the model's \(5,\)"):
    ob_nnx.load_original(less, {"last": {"bias": jnp.ones(3)}})
  with pytest.raises(ValueError, match=r"none of the model's paths"):
    ob_nnx.load_original(less, {"params": {"last": {"bias": jnp.ones(5)}}})
  with pytest.raises(TypeError, match=r"must be a model, an nnx.State or a nested dict"):
    ob_nnx.load_original(less, "model.ckpt")


def test_linen_variables_may_come_before_the_inputs():
  variables = jax.eval_shape(LinenNet().init, jax.random.key(0), X)
  plan = ob_linen.plan_less_bn(LinenNet(), X, train=True)
  assert ob_linen.plan_less_bn(LinenNet(), variables, X, train=True) == plan
  less = ob_linen.less_bn(LinenNet(), variables, X, train=True)
  assert less.plan == plan
  boost = ob_linen.auto_boost("O1", total_steps=4)
  assert boost.model(LinenNet(), variables, X, train=True).plan == plan
  assert ob_linen.plan_less_bn(LinenNet(), variables_of(LinenNet()), X) == plan


ABSTRACT = nnx.eval_shape(NnxNet)
BAD_OPTIONS = [
  ({"fn_flag": 1}, TypeError, r"`fn_flag` must be True or False; got 1"),
  ({"bias": "yes"}, TypeError, r"`bias` must be True or False; got 'yes'"),
  ({"multiplier": "2"}, TypeError, r"`multiplier` must be a real number"),
  ({"multiplier": float("nan")}, ValueError, r"`multiplier` must be finite and > 0; got nan"),
  ({"multiplier": 10**400}, ValueError, r"`multiplier` must be finite and > 0; got 1000"),
  (
    {"predicate": lambda place: np.ones(2)},
    TypeError,
    r"`predicate` must return True or False; got array\(\[1., 1.\]\) for",
  ),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS)
def test_bad_options_are_refused_in_words(options, error, message):
  for plan, model in ((ob_nnx.plan_less_bn, ABSTRACT), (ob_linen.plan_less_bn, LinenNet())):
    with pytest.raises(error, match=message):
      plan(model, X, **options)


def test_a_model_without_inputs_can_not_be_planned():
  for plan, model in ((ob_nnx.plan_less_bn, ABSTRACT), (ob_linen.plan_less_bn, LinenNet())):
    with pytest.raises(ValueError, match=r"needs the model's inputs, .*; got none. Or pass plan="):
      plan(model)
    with pytest.raises(ValueError, match=r"needs the model's inputs, .*; got 3, 'x'"):
      plan(model, 3, name="x")


def test_checkpoints_of_something_else_are_refused():
  model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
  for value, error, message in (
    ("a", TypeError, r"checkpoint's 'kernel' must be an array of numbers; got 'a'"),
    (np.array([["a"] * 2] * 2), TypeError, r"'kernel' must be an array of numbers; got array"),
    (jnp.ones((2, 2), complex), ValueError, r"'kernel' has dtype complex64, which does not fit"),
    (jax.random.split(jax.random.key(0), (2, 2)), ValueError, r"dtype key<fry>, which does not"),
  ):
    with pytest.raises(error, match=message):
      ob_nnx.load_original(model, {"kernel": value})
    with pytest.raises(error, match=message.replace("'kernel'", "'params/kernel'")):
      ob_linen.load_original(
        {"params": {"kernel": jnp.ones((2, 2))}}, {"params": {"kernel": value}}
      )
  with pytest.raises(ValueError, match=r"`checkpoint` must be a tree whose dicts have keys of one"):
    ob_nnx.load_original(model, {"kernel": jnp.ones((2, 2)), 0: jnp.ones(2)})
  with pytest.raises(TypeError, match=r"`model` must be an NNX module; got 3"):
    ob_nnx.load_original(3, {})
  with pytest.raises(TypeError, match=r"`checkpoint` must be a dict of collections; got 'w.ckpt'"):
    ob_linen.load_original({"params": {}}, "w.ckpt")


def test_warnings_point_at_the_caller():
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    plain = nnx.eval_shape(lambda: Plain(nnx.Rngs(0)))
    ob_nnx.plan_less_bn(plain, X)
    ob_linen.less_bn(nn.Dense(2), X)
    ob_nnx.less_bn(plain, X, fn_flag=True)
  assert len(caught) == 4
  assert {w.filename for w in caught} == {__file__}
