"""Groups of layers in the order of the forward pass, from a trace of the loss."""

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_boost
import optax_boost.linen as ob_linen
import optax_boost.nnx as ob_nnx
from tests.layer_groups.models import (
  BATCH,
  IMAGES,
  LAYERS,
  Convolutional,
  chain_loss,
  chain_outputs,
  chain_params,
  image_loss,
  image_plan,
  layer,
  with_custom_vjp,
)

with_custom_jvp = jax.custom_jvp(layer)


with_custom_jvp.defjvp(lambda primals, tangents: jax.jvp(layer, primals, tangents))


def in_scan(f):
  return lambda params, x: jax.lax.scan(lambda h, _: (f(params, h), None), x, length=2)[0]


def in_while(f):
  return lambda params, x: jax.lax.fori_loop(0, x.shape[0], lambda i, h: f(params, h), x)


def in_cond(f):
  return lambda params, x: jax.lax.cond(x[0, 0] > 0, f, lambda p, h: 2 * f(p, h), params, x)


WRAPPERS = {
  "plain": lambda f: f,
  "jit": jax.jit,
  "nested jit": lambda f: jax.jit(lambda p, x: jax.jit(f)(p, x)),
  "remat": jax.checkpoint,
  "custom_jvp": lambda f: with_custom_jvp,
  "custom_vjp": with_custom_vjp,
  "scan": in_scan,
  "while": in_while,
  "cond": in_cond,
  "vmap": lambda f: jax.vmap(f, (None, 0)),
  "all": lambda f: jax.jit(jax.checkpoint(in_scan(in_cond(jax.jit(with_custom_vjp(f)))))),
}


IN_ORDER = tuple((f"{n}/kernel", f"{n}/bias") for n in "dcba")


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_groups_follow_the_forward_pass_through(wrap):
  params = chain_params()
  plan = optax_boost.layer_groups(
    lambda p, x: chain_loss(p, x, wrap), params, BATCH, num_groups=LAYERS
  )
  assert plan.groups == IN_ORDER
  assert len(plan) == LAYERS
  assert plan.sizes == (72,) * LAYERS
  assert plan.unused == plan.reused == ()


def noisy(params, key):
  keys = dict(zip(params, jax.random.split(key, len(params)), strict=True))

  def kept(name):
    kernel = params[name]["kernel"]
    return kernel * jax.random.bernoulli(keys[name], 0.9, kernel.shape)

  return {name: layer | {"kernel": kept(name)} for name, layer in params.items()}


MASKS = jax.tree.map(lambda x: x > 0, chain_params())


# What is done to the params ahead of the forward pass, with further arguments, is not a use.
PREPARED = {
  "cast": (lambda p: jax.tree.map(lambda x: x.astype(jnp.bfloat16), p), ()),
  "normalized": (lambda p: jax.tree.map(lambda x: x / (1e-6 + jnp.linalg.norm(x)), p), ()),
  "noise": (lambda p: noisy(p, jax.random.key(0)), ()),
  "keyed noise": (noisy, (jax.random.key(0),)),
  "old keys": (noisy, (jax.random.PRNGKey(0),)),
  "mask": (lambda p: jax.tree.map(jnp.multiply, p, MASKS), ()),
  "scalar": (lambda p, scale: jax.tree.map(lambda x: x * scale, p), (0.5,)),
}


@pytest.mark.parametrize(("prepare", "args"), PREPARED.values(), ids=PREPARED)
def test_operations_on_params_before_the_forward_pass_do_not_count_as_uses(prepare, args):
  @jax.jit
  def loss(params, x, *args):
    decay = 1e-3 * optax.tree.norm(params, squared=True)
    return decay + chain_loss(prepare(params, *args), x)

  plan = optax_boost.layer_groups(loss, chain_params(), BATCH, *args, num_groups=LAYERS)
  assert plan.groups == IN_ORDER
  assert plan.reused == ()


def test_a_loss_without_data_tells_no_blocks_and_blocks_then_have_the_order_of_the_params():
  params = chain_params()

  def loss(params):
    return optax.tree.norm(params, True)

  with pytest.raises(ValueError, match=r'no plain chain. Pass blocks="a\|b\|c\|d" for each'):
    optax_boost.layer_groups(loss, params)
  plan = optax_boost.layer_groups(loss, params, num_groups=2, blocks="*")
  assert plan.groups[0] == ("a/bias", "a/kernel", "b/bias", "b/kernel")


def test_the_plan_names_leaves_that_the_trace_did_not_place():
  params = {"embed": jnp.ones((8, 8)), "body": jnp.ones((8, 8)), "idle": jnp.ones(3)}

  def loss(params, x):
    return jnp.mean(jnp.tanh(x @ params["embed"] @ params["body"]) @ params["embed"].T)

  plan = optax_boost.layer_groups(loss, params, BATCH, num_groups=2)
  assert plan.groups == (("embed",), ("body", "idle"))
  assert str(plan).splitlines() == [
    "group 0: 64 parameters (48.9 %): embed",
    "group 1: 67 parameters (51.1 %), never frozen: body, idle",
    "not used by the loss, so never frozen: idle",
    "used again later, frozen where they are used first: embed",
    'blocks: each layer of a chain; for others pass blocks="..."',
  ]


BASE = {name: layer["kernel"] for name, layer in chain_params().items()}


def adapter_params():
  keys = jax.random.split(jax.random.key(2), LAYERS)
  return {
    name: {"down": jax.random.normal(key, (8, 2)), "up": jnp.ones((2, 8))}
    for name, key in zip("abcd", keys, strict=True)
  }


def adapted(params, base):
  """Kernels of a base with an update of low rank, computed ahead of the forward pass."""
  return {
    name: {"kernel": base[name] + p["down"] @ p["up"], "bias": jnp.zeros(8)}
    for name, p in params.items()
  }


def in_layers(plan):
  return [sorted({path.split("/")[0] for path in group}) for group in plan.groups]


FORWARD = [["d"], ["c"], ["b"], ["a"]]


def test_base_weights_that_the_loss_closes_over_do_not_count_as_data():
  plan = optax_boost.layer_groups(
    lambda p, x: chain_loss(adapted(p, BASE), x), adapter_params(), BATCH, num_groups=LAYERS
  )
  assert in_layers(plan) == FORWARD


def test_base_weights_in_the_batch_count_as_data():
  batch = {"x": BATCH, "base": BASE}

  def loss(params, batch):
    return chain_loss(adapted(params, batch["base"]), batch["x"])

  # All layers meet data where they are adapted, so they are no chain.
  with pytest.raises(ValueError, match=r"the layers are no plain chain"):
    optax_boost.layer_groups(loss, adapter_params(), batch, num_groups=LAYERS)
  plan = optax_boost.layer_groups(loss, adapter_params(), batch, blocks="*")
  # The order in which the layers are adapted.
  assert in_layers(plan) == FORWARD[::-1]


@pytest.mark.parametrize(
  ("loss", "args"),
  [
    (lambda p: chain_loss(p, BATCH), ()),
    (jax.jit(lambda p: chain_loss(p, BATCH)), ()),
    (
      lambda p, key: chain_loss(p, BATCH + jax.random.normal(key, BATCH.shape)),
      (jax.random.key(0),),
    ),
    (lambda p, i: chain_loss(p, BATCH[i][None]), (3,)),
    (lambda p, k: chain_loss(p, jax.random.normal(k, BATCH.shape)), (jax.random.PRNGKey(0),)),
    (lambda p, k: chain_loss(noisy(p, k), BATCH), (jax.random.key(0),)),
    # A temperature, or targets alone, meet all params in one place.
    (lambda p, tau: jnp.mean(chain_outputs(p, BATCH) / tau), (2.0,)),
    (lambda p, y: jnp.mean((chain_outputs(p, BATCH) - y) ** 2), (BATCH,)),
  ],
  ids=["alone", "jit", "noise", "index", "generator", "noise on params", "tau", "targets"],
)
def test_constants_that_the_loss_closes_over_count_as_data_if_there_is_no_batch(loss, args):
  plan = optax_boost.layer_groups(loss, chain_params(), *args, num_groups=LAYERS)
  assert plan.groups == IN_ORDER


class Adapted(nnx.Module):
  """Layers whose frozen base weights are variables of their own."""

  def __init__(self):
    base, params = BASE, adapter_params()
    layer = getattr(nnx, "Dict", dict)  # flax before 0.12 takes plain containers
    for name in "abcd":
      variables = jax.tree.map(nnx.Param, params[name])
      setattr(self, name, layer(base=nnx.Variable(base[name]), **variables))

  def __call__(self, x):
    kernels = {n: vars(self)[n] for n in "abcd"}
    weights = {n: k["base"][...] + k["down"][...] @ k["up"][...] for n, k in kernels.items()}
    for name in "dcba":
      x = jnp.tanh(x @ weights[name])
    return x


def test_base_weights_of_an_nnx_model_do_not_count_as_data():
  split = ob_nnx.split_loss(image_loss, Adapted())
  plan = optax_boost.layer_groups(*split, BATCH, num_groups=LAYERS)
  assert in_layers(plan) == FORWARD


def test_overrides_beat_the_trace():
  plan = optax_boost.layer_groups(
    chain_loss, chain_params(), BATCH, num_groups=2, overrides={"d/bias": 1, "a/*": 0}
  )
  assert plan.groups[1] == ("d/bias", "b/kernel", "b/bias")
  with pytest.warns(optax_boost.NoEffectWarning, match=r"`overrides` has patterns .*\['nowhere'\]"):
    optax_boost.layer_groups(
      chain_loss, chain_params(), BATCH, num_groups=2, overrides={"nowhere": 1}
    )


@pytest.mark.parametrize("num_groups", [2, 3, 4])
def test_bias_and_normalization_stay_with_their_convolution(num_groups):
  plan = image_plan(Convolutional().init(jax.random.key(0), IMAGES), num_groups)
  for i in range(3):
    (home,) = [g for g in plan.groups if f"Conv_{i}/kernel" in g]
    assert {f"Conv_{i}/bias", f"BatchNorm_{i}/scale", f"BatchNorm_{i}/bias"} <= set(home)
  assert "Dense_0/kernel" in plan.groups[-1]


@pytest.mark.parametrize("names", ["batch", ("batch", "model")])
def test_a_loss_that_reduces_over_named_axes_is_traced_with_their_names(names):
  def loss(params, x):
    x = layer(params["b"], x)
    x -= jax.lax.pmean(jnp.mean(x, 0), names)
    x = layer(params["a"], jax.lax.all_gather(x, "batch", tiled=True))
    return jax.lax.pmean(jnp.mean(x), "batch") + jnp.sum(params["a"]["kernel"] ** 2)

  params = chain_params(2)
  with pytest.raises(ValueError, match=r"with its named axis: .*batch.* axis_name=\"batch\""):
    optax_boost.layer_groups(loss, params, BATCH)
  plan = optax_boost.layer_groups(loss, params, BATCH, axis_name=names)
  assert plan == optax_boost.layer_groups(chain_loss, params, BATCH)
  axes = optax_boost.layer_axes(loss, params, BATCH, axis_name=names)
  assert axes.axes == optax_boost.layer_axes(chain_loss, params, BATCH).axes
  with pytest.raises(TypeError, match="`axis_name` must be the name of a mesh axis"):
    optax_boost.layer_groups(loss, params, BATCH, axis_name=0)


def test_a_batch_norm_with_an_axis_name_is_traced_with_it():
  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.BatchNorm(use_running_average=False, axis_name="batch")(nn.Dense(4)(x))
      return nn.Dense(1)(nn.relu(x))

  variables = Net().init(jax.random.key(0), BATCH)
  split = ob_linen.split_loss(lambda model, x: jnp.mean(model(x)), Net(), variables)
  plan = optax_boost.layer_groups(*split, BATCH, axis_name="batch")
  assert [{path.split("/")[0] for path in group} for group in plan.groups] == [
    {"Dense_0", "BatchNorm_0"},
    {"Dense_1"},
  ]


def test_groups_of_a_deeper_model_are_refused_on_a_shallower_one():
  plan = optax_boost.layer_groups(chain_loss, chain_params(4), BATCH)
  shallow = chain_params(3)
  words = r"groups for other params: they have the leaf 'd/kernel', which these params lack"
  with pytest.raises(ValueError, match=f"`layerwise_decay` was given {words}"):
    optax_boost.layerwise_decay(optax.sgd(0.1), plan, 0.5).init(shallow)
  frozen = optax_boost.freeze_layers(optax.sgd(0.1), plan, optax_boost.fixed_freezing(4, 1))
  with pytest.raises(ValueError, match=f"`freeze_layers` was given {words}"):
    frozen.init(shallow)


@pytest.mark.parametrize("instead", [None, optax.MaskedNode()])
@pytest.mark.parametrize("whole", [True, False])
def test_leaves_of_a_plan_may_be_hidden(instead, whole):
  params = chain_params(3)
  plan = optax_boost.layer_groups(chain_loss, params, BATCH)
  hidden = params | {"c": instead if whole else jax.tree.map(lambda _: instead, params["c"])}
  decay = optax_boost.layerwise_decay(optax.identity(), plan, 0.5)
  ones = jax.tree.map(jnp.ones_like, hidden)
  updates, _ = decay.update(ones, decay.init(hidden))
  assert [updates[name]["bias"][0] for name in "ba"] == [0.5, 1.0]


def test_a_plan_may_be_in_an_optimizer_and_in_the_wrapper_around_it():
  params = chain_params(3)
  plan = optax_boost.layer_groups(chain_loss, params, BATCH)
  tx = optax_boost.layerwise_decay(optax.adam(0.1), plan, 0.5)
  tx = optax_boost.freeze_layers(tx, plan, optax_boost.fixed_freezing(3, 1))
  assert optax.tree.get(tx.init(params), "mu").keys() == params.keys()
