"""A traced loss tells the axes of its params, without any names or patterns."""

import functools

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost import nnx as ob_nnx
from tests import meshes

KEY = jax.random.key(0)
X = jnp.ones((2, 8))
TOKENS = jnp.zeros((2, 5), int)
SEQUENCE = jnp.ones((2, 5, 8))
IMAGE = jnp.ones((2, 6, 6, 4))


def axes(loss_fn, params, *args):
  """For each leaf its fan-in and its layers; what is left are outputs."""
  layers = optax_boost.layer_axes(loss_fn, params, *args)
  found = {}
  for path, described, leaf in zip(layers.paths, layers.axes, jax.tree.leaves(params), strict=True):
    assert sorted(described.fan_in + described.stacked + described.outputs) == list(
      range(leaf.ndim)
    )
    found[path] = (described.fan_in, described.stacked)
  return found


def linen_axes(module, x, **kwargs):
  params = jax.eval_shape(module.init, KEY, x)["params"]
  return axes(lambda p, x: jnp.sum(module.apply({"params": p}, x, **kwargs)), params, x)


def nnx_axes(model, x):
  graph, params, rest = nnx.split(model, nnx.Param, ...)
  return axes(lambda p, x: jnp.sum(nnx.merge(graph, p, rest)(x)), nnx.to_pure_dict(params), x)


@pytest.mark.parametrize(
  ("module", "x", "fan_in"),
  [
    (nn.Dense(3), X, (0,)),
    (nn.DenseGeneral((2, 3)), X, (0,)),
    (nn.DenseGeneral(3, axis=(-2, -1)), SEQUENCE, (0, 1)),
    (nn.DenseGeneral((2, 3), batch_dims=(0,)), X, (1,)),
    (nn.Conv(3, (3, 3)), IMAGE, (0, 1, 2)),
    (nn.Conv(3, (3, 3)), IMAGE[..., :1], (0, 1, 2)),
    (nn.Conv(6, (3, 3), feature_group_count=2), IMAGE, (0, 1, 2)),
    (nn.Conv(8, (3, 3), feature_group_count=4), IMAGE, (0, 1)),
    (nn.ConvTranspose(3, (3, 3)), IMAGE, (0, 1, 2)),
    (nn.ConvLocal(3, (3, 3)), IMAGE, (2,)),
  ],
)
def test_a_layer_of_flax(module, x, fan_in):
  found = linen_axes(module, x)
  assert found["kernel"][0] == fan_in
  assert found["bias"][0] == ()


def test_attention_of_flax():
  attention = nn.MultiHeadDotProductAttention(num_heads=2)
  found = linen_axes(attention, SEQUENCE)
  kernels = {path: both for path, both in found.items() if path.endswith("kernel")}
  assert kernels.pop("out/kernel") == ((0, 1), ())
  assert len(kernels) == 3
  assert set(kernels.values()) == {((0,), ())}
  nnx_found = nnx_axes(nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0)), SEQUENCE)
  assert {path: both for path, both in nnx_found.items() if "/" in path} == found


def attention(p, x, project="...BTD,NDH->...BTNH"):
  q, k, v = (jnp.einsum(project, x, p[name]) for name in "abc")
  weights = jax.nn.softmax(jnp.einsum("BTNH,BSNH->BNTS", q, k))
  mixed = jnp.einsum("BNTS,BSNH->BTNH", weights, v)
  return jnp.sum(jnp.einsum("BTNH,NHD->BTD", mixed, p["d"]))


def test_einsum_kernels_of_any_name():
  params = {name: jnp.ones((2, 8, 4)) for name in "abc"} | {"d": jnp.ones((2, 4, 8))}
  assert axes(attention, params, SEQUENCE) == {
    "a": ((1,), ()),
    "b": ((1,), ()),
    "c": ((1,), ()),
    "d": ((0, 1), ()),
  }


def test_one_kernel_for_queries_keys_and_values():
  def loss_fn(p, x):
    q, k, v = jnp.einsum("BTD,SNDH->SBTNH", x, p["einsum"])
    fused = (x @ p["dense"]).reshape(2, 5, 3, 2, 4)
    split = sum(jnp.sum(x @ w.reshape(8, 8)) for w in jnp.split(p["split"], 3, axis=1))
    return jnp.sum(q * k * v) + jnp.sum(fused[:, :, 0] * fused[:, :, 1]) + split

  kernels = {"einsum": (3, 2, 8, 4), "dense": (8, 24), "split": (8, 3, 8)}
  params = {name: jnp.ones(shape) for name, shape in kernels.items()}
  found = axes(loss_fn, params, SEQUENCE)
  assert found == {"dense": ((0,), ()), "einsum": ((2,), ()), "split": ((0,), (1,))}


def by_einsum(p, x):
  dispatched = jnp.stack([x, x, x])
  hidden = jnp.tanh(jnp.einsum("ecd,edf->ecf", dispatched, p["up"]) + p["bias"][:, None])
  return jnp.sum(jnp.einsum("ecf,efd->ecd", hidden, p["down"]))


def by_vmap(p, x):
  one = jax.vmap(lambda p: jnp.sum(jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]))
  return jnp.sum(one(p))


def by_ragged_dot(p, x):
  sizes = jnp.array([1, 1, 0])
  expert = jnp.array([0, 1])
  hidden = jnp.tanh(jax.lax.ragged_dot(x, p["up"], sizes) + p["bias"][expert])
  return jnp.sum(jax.lax.ragged_dot(hidden, p["down"], sizes))


def by_lookup(p, x):
  expert = jnp.argmax(x[:, :3], axis=1)
  hidden = jnp.einsum("td,tdf->tf", x, p["up"][expert].astype(jnp.bfloat16))
  return jnp.sum(jnp.einsum("tf,tfd->td", jnp.tanh(hidden + p["bias"][expert]), p["down"][expert]))


@pytest.mark.parametrize("loss_fn", [by_einsum, by_vmap, by_ragged_dot])
def test_stacked_experts(loss_fn):
  params = {"up": jnp.ones((3, 8, 6)), "bias": jnp.ones((3, 6)), "down": jnp.ones((3, 6, 8))}
  found = axes(loss_fn, params, X)
  assert found["up"] == found["down"] == ((1,), (0,))
  # The rows of the biases for `ragged_dot` are read as of a table.
  assert found["bias"] == ((), () if loss_fn is by_ragged_dot else (0,))


def test_a_number_of_each_member_of_an_ensemble_is_a_layer():
  params = {"up": jnp.ones((3, 8, 6)), "slope": jnp.ones(3), "down": jnp.ones((3, 6, 8))}

  def loss_fn(p, x):
    member = lambda p: jax.nn.leaky_relu(x @ p["up"], p["slope"]) @ p["down"]  # noqa: E731
    return jnp.sum(jax.vmap(member)(p))

  assert axes(loss_fn, params, X)["slope"] == ((), (0,))


def test_convolutions_of_members_that_see_the_same_images_are_layers():
  params = {"first": jnp.ones((3, 3, 3, 4, 6)), "second": jnp.ones((3, 3, 3, 6, 5))}

  def member(p, x):
    for kernel in (p["first"], p["second"]):
      numbers = ("NHWC", "HWIO", "NHWC")
      x = jnp.tanh(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", None, None, numbers))
    return jnp.sum(x)

  def loss_fn(p, x):
    return jnp.sum(jax.vmap(member, (0, None))(p, x))

  assert axes(loss_fn, params, IMAGE) == dict.fromkeys(params, ((1, 2, 3), (0,)))


def test_experts_that_each_token_looks_up():
  params = {"up": jnp.ones((3, 8, 6)), "bias": jnp.ones((3, 6)), "down": jnp.ones((3, 6, 8))}
  found = axes(by_lookup, params, X)
  assert found["up"] == found["down"] == ((1,), (0,))
  assert found["bias"][0] == ()


def test_experts_that_each_token_of_an_embedding_looks_up():
  """Rows of tokens and kernels of experts are both looked up, but only kernels have outputs."""
  params = {"embed": jnp.ones((9, 8)), "up": jnp.ones((3, 8, 6)), "down": jnp.ones((3, 6, 8))}

  def loss_fn(p, tokens):
    x, expert = p["embed"][tokens], tokens % 3
    hidden = jnp.tanh(jnp.einsum("btd,btdf->btf", x, p["up"][expert]))
    return jnp.sum(jnp.einsum("btf,btfd->btd", hidden, p["down"][expert]))

  experts = ((1,), (0,))
  assert axes(loss_fn, params, TOKENS) == {"embed": ((), ()), "up": experts, "down": experts}


def test_a_router_is_one_kernel_although_experts_lie_along_its_outputs():
  """Of the Switch transformer: one-hot matrices dispatch tokens to the slots of experts."""
  params = {"router": {"kernel": jnp.ones((8, 3)), "bias": jnp.ones(3)}}
  params |= {"up": jnp.ones((3, 8, 6)), "down": jnp.ones((3, 6, 8))}

  def loss_fn(p, x):
    chosen = jax.nn.softmax(x @ p["router"]["kernel"] + p["router"]["bias"])
    mask = jax.nn.one_hot(jnp.argmax(chosen, -1), 3)
    slot = jax.nn.one_hot((jnp.cumsum(mask, 0) * mask).sum(-1).astype(int) - 1, 2)
    dispatch = mask[..., None] * slot[:, None]
    combine = dispatch * (chosen * mask).sum(-1)[:, None, None]
    hidden = jnp.tanh(jnp.einsum("ecd,edf->ecf", jnp.einsum("td,tec->ecd", x, dispatch), p["up"]))
    y = jnp.einsum("ecf,efd->ecd", hidden, p["down"])
    return jnp.sum(jnp.einsum("ecd,tec->td", y, combine)) + jnp.sum(mask.mean(0) * chosen.mean(0))

  experts = ((1,), (0,))
  assert axes(loss_fn, params, X) == {
    "router/kernel": ((0,), ()),
    "router/bias": ((), ()),
    "up": experts,
    "down": experts,
  }


def by_style(w, x, style):
  """Of StyleGAN 2: each example's style scales the kernel, and a norm makes up for it."""
  modulated = w[None] * style[:, None, None, :, None]
  modulated *= jax.lax.rsqrt(jnp.sum(modulated**2, (1, 2, 3), keepdims=True) + 1e-8)
  kernel = jnp.transpose(modulated, (1, 2, 3, 0, 4)).reshape(*w.shape[:3], -1)
  together = jnp.transpose(x, (1, 2, 0, 3)).reshape(1, *x.shape[1:3], -1)
  numbers = ("NHWC", "HWIO", "NHWC")
  y = jax.lax.conv_general_dilated(
    together, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=len(x)
  )
  return jnp.transpose(y.reshape(*x.shape[1:3], len(x), -1), (2, 0, 1, 3))


def test_kernels_that_each_example_scales_have_a_fan_in_and_the_constant_they_begin_with_has_none():
  params = {"const": jnp.ones((1, 6, 6, 4)), "affine": jnp.ones((8, 4))}
  params |= {"first": jnp.ones((3, 3, 4, 4)), "second": jnp.ones((3, 3, 4, 5))}

  def loss_fn(p, x):
    style = x @ p["affine"]
    h = by_style(p["first"], jnp.tile(p["const"], (len(x), 1, 1, 1)), style)
    return jnp.sum(by_style(p["second"], jnp.tanh(h), style))

  convs = ((0, 1, 2), ())
  assert axes(loss_fn, params, X) == {
    "const": ((), ()),
    "affine": ((0,), ()),
    "first": convs,
    "second": convs,
  }


def test_tables_that_scale_activations_or_scores_have_no_fan_in():
  """Data then sum over positions, as over the inputs of a kernel."""
  params = {"gain": jnp.ones((5, 8)), "decay": jnp.ones((2, 5, 5)), "pool": jnp.ones((8, 1))}

  def loss_fn(p, x):
    heads = x.reshape(2, 5, 2, 4)
    scores = jnp.einsum("bqhd,bkhd->bhqk", heads, heads) * p["decay"]
    x += jnp.einsum("bhqk,bkhd->bqhd", scores, heads).reshape(x.shape)
    weights = jax.nn.softmax(x @ p["pool"], axis=1)[..., 0]
    return jnp.sum(jnp.einsum("bt,btd->bd", weights, x * p["gain"]))

  found = axes(loss_fn, params, SEQUENCE)
  assert {name: fan_in for name, (fan_in, _) in found.items()} == {
    "gain": (),
    "decay": (),
    "pool": (0,),
  }


@pytest.mark.parametrize(
  "masked", [lambda w, m: w * m, lambda w, m: jnp.where(m > 0, w, 0.0)], ids=["times", "where"]
)
def test_kernels_with_masks_among_the_arguments_have_a_fan_in_and_are_layers(masked):
  params = {"first": jnp.ones((8, 6)), "many": jnp.ones((3, 6, 6)), "last": jnp.ones((6, 2))}

  def loss_fn(p, masks, x):
    layer = lambda h, pair: (jnp.tanh(h @ masked(*pair)), None)  # noqa: E731
    h, _ = jax.lax.scan(layer, x @ masked(p["first"], masks["first"]), (p["many"], masks["many"]))
    return jnp.sum(h @ masked(p["last"], masks["last"]))

  assert axes(loss_fn, params, params, X) == {
    "first": ((0,), ()),
    "many": ((1,), (0,)),
    "last": ((0,), ()),
  }


def test_the_vector_of_a_spectral_norm_among_the_arguments_is_no_input_of_the_kernel():
  params = {"kernel": jnp.ones((8, 6)), "head": jnp.ones((6, 2))}

  def normalized(w, u):
    v = u @ w.T
    v /= jnp.linalg.norm(v)
    u = v @ w
    u, v = jax.lax.stop_gradient((u / jnp.linalg.norm(u), v))
    return w / (v @ w @ u)

  def loss_fn(p, u, x):
    return jnp.sum(jnp.tanh(x @ normalized(p["kernel"], u)) @ p["head"])

  assert axes(loss_fn, params, jnp.ones(6), X) == {"kernel": ((0,), ()), "head": ((0,), ())}


class SideBySide(nnx.Module):
  """Layers made and run by ``nnx.vmap``."""

  def __init__(self):
    @nnx.vmap(in_axes=0)
    def make(key):
      return nnx.Linear(8, 8, rngs=nnx.Rngs(key))

    self.blocks = make(jax.random.split(KEY, 3))

  def __call__(self, x):
    return nnx.vmap(lambda m, x: jnp.tanh(m(x)), in_axes=(0, 0))(self.blocks, jnp.stack([x] * 3))


def test_layers_of_nnx_side_by_side():
  found = nnx_axes(SideBySide(), X)
  assert found == {"blocks/bias": ((), (0,)), "blocks/kernel": ((1,), (0,))}


def test_layers_of_equinox_have_their_outputs_first():
  params = {
    "linear": {"weight": jnp.ones((3, 5)), "bias": jnp.ones(3)},
    "conv": {"weight": jnp.ones((5, 4, 3, 3)), "bias": jnp.ones((5, 1, 1))},
  }

  def model(p, x):
    x = jax.lax.conv_general_dilated(x[None], p["conv"]["weight"], (1, 1), "SAME")[0]
    x = jnp.mean(x + p["conv"]["bias"], (1, 2))
    return p["linear"]["weight"] @ x + p["linear"]["bias"]

  found = axes(
    lambda p, x: jnp.sum(jax.vmap(model, (None, 0))(p, x)), params, jnp.ones((2, 4, 6, 6))
  )
  assert found["linear/weight"] == ((1,), ())
  assert found["conv/weight"] == ((1, 2, 3), ())
  assert found["linear/bias"] == found["conv/bias"] == ((), ())


def test_rows_of_embeddings_are_looked_up():
  params = {
    "tied": jnp.ones((9, 8)),
    "segment": jnp.ones((2, 8)),
    "position": jnp.ones((7, 8)),
    "kernel": jnp.ones((8, 8)),
  }

  def loss_fn(p, tokens):
    x = jnp.sqrt(8.0) * p["tied"][tokens] + p["position"][: tokens.shape[1]]
    x = (x + jnp.take(p["segment"], tokens > 0, axis=0)) @ p["kernel"]
    return jnp.sum(x @ p["tied"].T)

  found = axes(loss_fn, params, TOKENS)
  assert found.pop("kernel") == ((0,), ())
  assert set(found.values()) == {((), ())}


def test_the_kernel_after_an_embedding_is_not_taken_for_an_embedding():
  params = {"rows": jnp.ones((9, 8)), "kernel": jnp.ones((8, 4))}
  found = axes(lambda p, tokens: jnp.sum(p["rows"][tokens] @ p["kernel"]), params, TOKENS)
  assert found == {"kernel": ((0,), ()), "rows": ((), ())}


def test_two_embeddings_that_are_compared_have_no_fan_in():
  params = {"users": jnp.ones((9, 8)), "items": jnp.ones((7, 8))}

  def loss_fn(p, tokens):
    return jnp.sum(jnp.einsum("bd,bd->b", p["users"][tokens[:, 0]], p["items"][tokens[:, 1]]))

  assert set(axes(loss_fn, params, TOKENS).values()) == {((), ())}


@pytest.mark.parametrize(
  "loss_fn",
  [
    lambda p, x: x @ p["w"][0] @ p["w"][1],
    lambda p, x: jax.lax.fori_loop(0, 2, lambda i, x: x @ p["w"][i], x),
    lambda p, x: jax.lax.while_loop(
      lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ p["w"][c[0]]), (0, x)
    )[1],
    lambda p, x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ p["w"][0], lambda x: x @ p["w"][1], x),
    lambda p, x: jax.lax.map(lambda w: x @ w, p["w"]),
  ],
  ids=["unrolled", "fori", "while", "cond", "map"],
)
def test_layers_taken_one_by_one(loss_fn):
  found = axes(lambda p, x: jnp.sum(loss_fn(p, x)), {"w": jnp.ones((2, 8, 8))}, X)
  assert found == {"w": ((1,), (0,))}


def test_kernels_that_one_loop_makes_for_another_one():
  def loss_fn(p, x):
    many = jax.lax.map(lambda w: w / jnp.linalg.norm(w), p["many"])
    one = jax.lax.map(lambda i: i * p["one"], jnp.arange(2.0))
    return jnp.sum(jax.lax.scan(lambda h, w: (h @ w[0] @ w[1], None), x, (many, one))[0])

  found = axes(loss_fn, {"many": jnp.ones((2, 8, 8)), "one": jnp.ones((8, 8))}, X)
  assert found == {"many": ((1,), (0,)), "one": ((0,), ())}


def dense(p, x):
  return x @ p["w"] + p["b"]


@jax.custom_jvp
def with_jvp(p, x):
  return dense(p, x)


@jax.custom_vjp
def with_vjp(p, x):
  return dense(p, x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), with_jvp(*primals)))
with_vjp.defvjp(lambda p, x: (dense(p, x), None), lambda _, g: (g, g))


def in_shard_map(p, x):
  mesh = meshes.mesh((1,), ("data",))
  specs = (jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data"))
  return jax.shard_map(dense, mesh=mesh, in_specs=specs, out_specs=specs[1])(p, x)


@pytest.mark.parametrize(
  "loss_fn",
  [
    jax.jit(dense),
    jax.checkpoint(dense),
    with_jvp,
    with_vjp,
    in_shard_map,
    lambda p, x: dense(jax.tree.map(lambda a: a.astype(jnp.bfloat16), p), x),
    lambda p, x: dense(jax.lax.optimization_barrier(p), x),
    lambda p, x: jax.lax.cond(x[0, 0] > 0, dense, dense, p, x),
    lambda p, x: jax.lax.scan(
      lambda h, row: (jnp.tanh(h @ p["w"][:, :8] + row), dense(p, h)), x, jnp.stack([x, x])
    )[1],
    lambda p, x: x @ p["w"].reshape(4, 2, 3, 4).transpose(2, 3, 0, 1).reshape(12, 8).T + p["b"],
    lambda p, x: jnp.einsum("bf,fd->bd", x, p["w"] / jnp.linalg.norm(p["w"], axis=0)) * p["b"],
    lambda p, x: x @ (p["w"] + 0.1 * jnp.tanh(p["w"])) + p["b"],
  ],
)
def test_kernels_are_found_in_programs_of_many_forms(loss_fn):
  params = {"w": jnp.ones((8, 12)), "b": jnp.ones(12)}
  assert axes(lambda p, x: jnp.sum(loss_fn(p, x)), params, X) == {"b": ((), ()), "w": ((0,), ())}


def test_adapters_added_to_a_kernel():
  shapes = {"w": (8, 6), "down": (8, 2), "up": (2, 6)}
  params = {name: jnp.ones(shape) for name, shape in shapes.items()}
  added = axes(lambda p, x: jnp.sum(x @ (p["w"] + p["down"] @ p["up"])), params, X)
  assert set(added.values()) == {((0,), ())}


def test_an_ambiguous_program_gets_no_description():
  params = {"blocks": jnp.ones((32, 2)), "unused": jnp.ones(3), "spectrum": jnp.ones((8, 8))}

  def loss_fn(p, x):
    diagonal = jnp.einsum("bnd,ndf->bnf", x.reshape(2, 2, 4), p["blocks"].reshape(2, 4, 8))
    return jnp.sum(diagonal) + jnp.sum(x @ jnp.fft.fft(p["spectrum"]).real)

  layers = optax_boost.layer_axes(loss_fn, params, X)
  assert dict(zip(layers.paths, layers.axes, strict=True)) == dict.fromkeys(params)


def test_a_description_is_hashable_and_has_no_leaves():
  params = {"w": jnp.ones((8, 8))}
  losses = (lambda p, x, _=copy: jnp.sum(x @ p["w"]) for copy in range(2))
  first, second = (optax_boost.layer_axes(loss_fn, params, X) for loss_fn in losses)
  assert first == second
  assert hash(first) == hash(second)
  assert jax.tree.leaves(first) == []
  assert jax.jit(lambda layers: layers)(first) == first


def layer(x, w):
  return jnp.tanh(x @ w["kernel"] + w["bias"]), None


def plain(params, x, body=layer, move=lambda w: w):
  x, _ = jax.lax.scan(body, x, move(params["blocks"]))
  return jnp.mean(x @ params["head"])


SCANNED = {
  "blocks": {"kernel": jnp.ones((3, 8, 8)), "bias": jnp.ones((3, 8))},
  "head": jnp.ones((8, 1)),
}
BOTH = {"blocks/bias": (0,), "blocks/kernel": (0,)}


def stacked_axes(*args):
  """The axes of layers of the leaves that hold some."""
  described = optax_boost.layer_axes(*args)
  pairs = zip(described.paths, described.axes, strict=True)
  return {path: axes.stacked for path, axes in pairs if axes is not None and axes.stacked}


@pytest.mark.parametrize(
  "loss_fn",
  [
    plain,
    jax.jit(plain),
    functools.partial(plain, body=jax.checkpoint(layer)),
    functools.partial(plain, move=lambda w: jax.tree.map(lambda a: 0.5 * a.astype("bfloat16"), w)),
    functools.partial(plain, move=lambda w: jax.tree.map(lambda a: jnp.tanh(a) ** 2, w)),
    functools.partial(plain, move=jax.lax.optimization_barrier),
    lambda p, x: plain(jax.lax.optimization_barrier(p), x),
    lambda p, x: jax.checkpoint(plain)(p, x),
    lambda p, x: jax.lax.cond(x[0, 0] > 0, plain, plain, p, x),
    lambda p, x: jax.lax.fori_loop(0, 2, lambda _, total: total + plain(p, x), 0.0),
  ],
)
def test_scans_are_found_in_programs_of_many_forms(loss_fn):
  assert stacked_axes(loss_fn, SCANNED, X) == BOTH


def test_a_loss_that_was_redefined_is_traced_again():
  """As in a notebook, where the model is defined again and the loss that calls it is not."""
  models = [lambda p, x: jnp.sum(p["blocks"]["kernel"]), plain]

  def loss_fn(p, x):
    return models[0](p, x)

  assert not stacked_axes(loss_fn, SCANNED, X)
  models.pop(0)
  assert stacked_axes(loss_fn, SCANNED, X) == BOTH


def scanned(kernels, x):
  return jax.lax.scan(lambda x, w: (x @ w, None), x, kernels)


def scans_in_a_scan(kernels, x):
  return jax.lax.scan(lambda x, inner: scanned(inner, x), x, kernels)


@pytest.mark.parametrize(
  ("shape", "loss_fn", "expected"),
  [
    ((8, 3, 8), lambda w, x: scanned(jnp.moveaxis(w, 1, 0), x), (1,)),
    ((3, 8, 2, 4), lambda w, x: scanned(w.reshape(-1, 8, 8), x), (0,)),
    ((3, 2, 8, 8), lambda w, x: scanned(w.reshape(-1, 8, 8), x), (0, 1)),
    ((2, 3, 8, 8), scans_in_a_scan, (0, 1)),
    ((3, 2, 8, 8), lambda w, x: scans_in_a_scan(w.swapaxes(0, 1), x), (0, 1)),
    ((8, 8), lambda w, x: jax.lax.scan(lambda h, x: (jnp.tanh(x @ w + h), None), x[0], x), None),
  ],
  ids=["transposed", "heads", "joined", "in a scan", "inner axis first", "data alone"],
)
def test_each_leaf_has_its_own_stacked_axes(shape, loss_fn, expected):
  found = stacked_axes(lambda p, x: jnp.sum(loss_fn(p["w"], x)[0]), {"w": jnp.ones(shape)}, X)
  assert found == ({} if expected is None else {"w": expected})


def test_only_trained_variables_of_an_nnx_model_are_described():
  biases = nnx.All(nnx.Param, nnx.PathContains("bias"))
  split = ob_nnx.split_loss(lambda model, x: jnp.sum(model(x)), SideBySide(), wrt=biases)
  assert optax_boost.layer_axes(*split, X).paths == ("blocks/bias",)


def test_ranks_are_sorted_again_when_a_later_step_knows_the_layers():
  tx = optax_boost.sgperm(alpha_min=0.2, method="rank")
  start = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), SCANNED)
  state = tx.init(start)
  updates, state = jax.jit(tx.update)(start, state, start)
  layers = optax_boost.layer_axes(plain, start, X)
  update = jax.jit(functools.partial(tx.update, layers=layers))
  _, state = update(start, state, optax.apply_updates(start, updates))
  for moved, first in zip(
    jax.tree.leaves(optax_boost.permuted_params(state).params), jax.tree.leaves(start), strict=True
  ):
    np.testing.assert_array_equal(np.sort(moved, None), np.sort(first, None))


# The leaf `time` is a kernel whose input no data goes into; all others meet data.
TIMES = np.linspace(0, 1, 12).reshape(2, 6)


def noise(p, key, x):
  return jax.random.uniform(key, (2, 6)) @ p["time"]


def waves_of_noise(p, key, x):
  steps = jax.random.randint(key, (2,), 0, 1000)
  return jnp.sin(steps[:, None] * 10.0 ** jnp.arange(6)) @ p["time"]


def a_table(p, key, x):
  return jnp.asarray(TIMES) @ p["time"]


def a_computed_table(p, key, x):
  return jnp.cos(jnp.arange(12.0)).reshape(2, 6) @ p["time"]


def rows_of_a_computed_table(p, key, x):
  table = jnp.cos(jnp.arange(30.0)).reshape(5, 6) @ p["time"]
  return table[jnp.argmax(x[:, :5], axis=1)]


def kernel_first(p, key, x):
  return (p["time"].T @ jnp.asarray(TIMES).T).T


def vmapped_kernel_first(p, key, x):
  return jax.vmap(lambda row: p["time"].T @ row)(jnp.asarray(TIMES))


def in_a_scan(p, key, x):
  return jax.lax.scan(lambda h, row: (h, row @ p["time"]), 0, jnp.asarray(TIMES))[1]


@pytest.mark.parametrize(
  "generated",
  [
    noise,
    waves_of_noise,
    a_table,
    a_computed_table,
    rows_of_a_computed_table,
    kernel_first,
    vmapped_kernel_first,
    in_a_scan,
  ],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_kernel_has_a_fan_in_even_if_its_input_does_not_depend_on_data(generated, depth):
  params = {"trunk": jnp.ones((8, 4)), "time": jnp.ones((6, 4)), "head": jnp.ones((4, 3))}
  params["shift"] = jnp.ones((2, 4))
  if depth == 2:
    params["next"] = jnp.ones((4, 4))

  def loss_fn(p, x, key):
    embedding = generated(p, key, x)
    embedding = jax.nn.gelu(embedding) @ p["next"] if depth == 2 else embedding
    return jnp.sum(jnp.tanh(x @ p["trunk"] + jnp.tanh(embedding) + p["shift"]) @ p["head"])

  kernels = dict.fromkeys(params.keys() - {"shift"}, ((0,), ()))
  assert axes(loss_fn, params, X, KEY) == kernels | {"shift": ((), ())}


def test_einsums_convolutions_and_experts_have_a_fan_in_even_if_their_input_is_not_data():
  params = {
    "trunk": jnp.ones((8, 4)),
    "heads": jnp.ones((2, 6, 2)),
    "conv": jnp.ones((3, 6, 4)),
    "experts": jnp.ones((2, 6, 4)),
  }

  def loss_fn(p, x, key):
    noise = jax.random.normal(key, (2, 5, 6))
    heads = jnp.einsum("bd,ndh->bnh", noise[:, 0], p["heads"]).reshape(2, 4)
    conv = jax.lax.conv_general_dilated(
      noise, p["conv"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    experts = jnp.einsum("etd,edf->etf", noise, p["experts"])
    return jnp.sum(x @ p["trunk"] + heads + conv[:, 0]) + jnp.sum(x[:, :4] * experts[:, 0])

  assert axes(loss_fn, params, X, KEY) == {
    "conv": ((0, 1), ()),
    "experts": ((1,), (0,)),
    "heads": ((1,), ()),
    "trunk": ((0,), ()),
  }


@pytest.mark.parametrize("layout", ["flax", "equinox"])
def test_a_kernel_that_a_learned_table_is_multiplied_with_has_a_fan_in(layout):
  shapes = {"trunk": (8, 4), "table": (2, 6), "weight": (6, 4) if layout == "flax" else (4, 6)}

  def loss_fn(p, x):
    if layout == "flax":
      rows = p["table"] @ p["weight"]
    else:
      rows = jax.vmap(lambda row: p["weight"] @ row)(p["table"])
    return jnp.sum(jnp.tanh(x @ p["trunk"] + rows))

  params = {name: jnp.ones(shape) for name, shape in shapes.items()}
  assert axes(loss_fn, params, X) == {
    "table": ((), ()),
    "trunk": ((0,), ()),
    "weight": ((0 if layout == "flax" else 1,), ()),
  }


def test_a_table_that_constants_resize_and_a_penalty_have_no_fan_in():
  params = {"pos_embedding": jnp.ones((4, 8)), "pos_embed": jnp.ones((4, 8))}
  params |= {"trunk": jnp.ones((8, 4)), "free": jnp.ones((8, 4))}

  def loss_fn(p, x):
    tables = [
      jax.image.resize(p[name], (2, 8), "linear") for name in ("pos_embedding", "pos_embed")
    ]
    gram = p["free"].T @ p["free"]
    return jnp.sum((x + sum(tables)) @ p["trunk"]) + jnp.sum(gram**2)

  found = optax_boost.layer_axes(loss_fn, params, X)
  pairs = zip(found.paths, found.axes, strict=True)
  fan_ins = {path: described and described.fan_in for path, described in pairs}
  assert fan_ins == {"free": None, "pos_embed": (), "pos_embedding": (), "trunk": (0,)}


@pytest.mark.parametrize("names", ["batch", ("batch", "model")])
def test_a_loss_that_reduces_over_named_axes_is_traced_with_their_names(names):
  params = {"first": jnp.ones((8, 6)), "scale": jnp.ones(6), "last": jnp.ones((6, 2))}

  def loss_fn(p, x):
    x = x @ p["first"] * p["scale"]
    x = jax.lax.all_gather(x - jax.lax.pmean(jnp.mean(x, 0), names), "batch", tiled=True)
    return jax.lax.pmean(jnp.mean(x @ p["last"]), "batch") + jnp.sum(p["last"] ** 2)

  with pytest.raises(ValueError, match=r"with its named axis: .*batch.* axis_name=\"batch\""):
    optax_boost.layer_axes(loss_fn, params, X)
  found = optax_boost.layer_axes(loss_fn, params, X, axis_name=names)
  assert dict(zip(found.paths, (axes.fan_in for axes in found.axes), strict=True)) == {
    "first": (0,),
    "last": (0,),
    "scale": (),
  }
  with pytest.raises(TypeError, match="`axis_name` must be the name of a mesh axis"):
    optax_boost.layer_axes(loss_fn, params, X, axis_name=0)


def test_the_axis_of_layers_is_known_if_a_scan_slices_a_leaf_that_nothing_else_uses():
  params = {"used": jnp.ones((3, 8, 8)), "idle": jnp.ones((3, 4)), "beside": jnp.ones(2)}

  def loss_fn(p, x):
    x, _ = jax.lax.scan(lambda x, w: (x @ w[0], None), x, (p["used"], p["idle"]))
    return jnp.sum(x)

  assert str(optax_boost.layer_axes(loss_fn, params, X)).splitlines() == [
    "beside: unknown",
    "idle: layers (0,), unknown (1,)",
    "used: layers (0,), fan-in (1,), outputs (2,)",
  ]


@pytest.mark.parametrize(
  ("taken", "layers"), [((0, 1, 2), (0,)), ((2, 0, 1, 0), (0,)), ((0, 2), ()), ((1,), ())]
)
def test_entries_that_the_program_takes_by_number_are_layers_if_it_takes_all(taken, layers):
  params = {"w": jnp.ones((3, 8, 8))}

  def loss_fn(p, x):
    for i in taken:
      x = jnp.tanh(x @ p["w"][i])
    return jnp.sum(x)

  assert axes(loss_fn, params, X)["w"] == ((1,), layers)
