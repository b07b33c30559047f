"""Which reads of a leaf make layers: one entry at a time, by a number that the program counts.

Each program has its axes by hand, as one reads them from the program.
"""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
import pytest

import optax_boost

WIDTH, OUT, LAYERS, LENGTH, VOCAB = 6, 5, 4, 7, 9
ROWS = jax.ShapeDtypeStruct((3, WIDTH), jnp.float32)
SEQUENCES = jax.ShapeDtypeStruct((3, LENGTH, WIDTH), jnp.float32)
TOKENS = jax.ShapeDtypeStruct((3, LENGTH), jnp.int32)


def shape(*sizes):
  return jax.ShapeDtypeStruct(sizes, jnp.float32)


def axes(loss_fn, params, *args):
  """For each leaf its fan-in and its layers."""
  layers = optax_boost.layer_axes(loss_fn, params, *args)
  pairs = zip(layers.paths, layers.axes, strict=True)
  return {path: described and (described.fan_in, described.stacked) for path, described in pairs}


TABLES = {
  "arange": ((16, WIDTH), lambda t: t[jnp.arange(LENGTH)]),
  "arange of a batch": ((16, WIDTH), lambda t: t[jnp.arange(LENGTH)[None]]),
  "arange of all rows": ((LENGTH, WIDTH), lambda t: t[jnp.arange(LENGTH)]),
  "take with an offset": ((16, WIDTH), lambda t: jnp.take(t, jnp.arange(LENGTH) + 2, axis=0)),
  "vmapped index": ((16, WIDTH), lambda t: jax.vmap(lambda i: t[i])(jnp.arange(LENGTH))),
  "slice": ((16, WIDTH), lambda t: t[2 : 2 + LENGTH]),
  "token types": ((2, WIDTH), lambda t: t[jnp.zeros((3, LENGTH), int)]),
  "one token type": ((2, WIDTH), lambda t: t[0]),
  "first row apart": ((LENGTH, WIDTH), lambda t: jnp.concatenate([t[0][None], t[1:]])),
  "class token apart": (
    (1, LENGTH, WIDTH),
    lambda t: jnp.concatenate([t[:, 0][:, None], t[:, 1:]], 1),
  ),
  "slice of one row apart": (
    (1, LENGTH, WIDTH),
    lambda t: jnp.concatenate([t[:, :1], t[:, 1:]], 1),
  ),
  "rolled": ((LENGTH, WIDTH), lambda t: jnp.roll(t, 1, 0)),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_one_layer_however_the_program_reads_its_rows(name):
  sizes, read = TABLES[name]
  params = {"table": shape(*sizes), "head": shape(WIDTH, 2)}

  def loss_fn(p, x):
    return jnp.sum(jnp.tanh(x + read(p["table"])) @ p["head"])

  assert axes(loss_fn, params, SEQUENCES) == {"table": ((), ()), "head": ((0,), ())}


BUCKETS = np.arange(LENGTH)[None] - np.arange(LENGTH)[:, None]


@pytest.mark.parametrize(
  "read",
  [
    lambda t: jnp.moveaxis(t[jnp.clip(BUCKETS + 4, 0, 8)], -1, 0),
    lambda t: t[BUCKETS.reshape(-1) + 6].reshape(LENGTH, LENGTH, 2).transpose(2, 0, 1),
  ],
  ids=["T5", "Swin, BEiT"],
)
def test_a_table_of_relative_positions_is_one_layer(read):
  params = {"table": shape(13, 2), "query": shape(WIDTH, 2, 3), "key": shape(WIDTH, 2, 3)}

  def loss_fn(p, x):
    q, k = (jnp.einsum("bld,dhk->blhk", x, p[name]) for name in ("query", "key"))
    return jnp.sum(jax.nn.softmax(jnp.einsum("bqhk,blhk->bhql", q, k) + read(p["table"])))

  kernels = dict.fromkeys(("query", "key"), ((0,), ()))
  assert axes(loss_fn, params, SEQUENCES) == kernels | {"table": ((), ())}


def test_a_number_of_the_batch_selects_a_row_of_a_table_and_a_kernel_of_an_expert():
  params = {"task": shape(5, WIDTH), "heads": shape(5, WIDTH, 2), "trunk": shape(WIDTH, WIDTH)}

  def loss_fn(p, batch):
    x = jnp.tanh((batch["x"] + p["task"][batch["task"]]) @ p["trunk"])
    return jnp.sum(x @ p["heads"][batch["task"]])

  batch = {"x": ROWS, "task": jax.ShapeDtypeStruct((), jnp.int32)}
  assert axes(loss_fn, params, batch) == {
    "heads": ((1,), (0,)),
    "task": ((), ()),
    "trunk": ((0,), ()),
  }


def largest(w, axis):
  return jnp.max(jnp.abs(w), axis, keepdims=True)


def quantized(w, axis):
  scale = largest(w, axis) / 127
  return w + jax.lax.stop_gradient(jnp.round(w / scale).astype(jnp.int8) * scale - w)


OWN_NUMBERS = {
  "divided": lambda w, axis: w / jnp.linalg.norm(w, axis=axis, keepdims=True),
  "standardized": lambda w, axis: (w - w.mean(axis, keepdims=True)) / w.std(axis, keepdims=True),
  "masked": lambda w, axis: jnp.where(jnp.abs(w) > 0.1 * largest(w, axis), w, 0.0),
  "quantized": quantized,
}


@pytest.mark.parametrize("axis", [0, 1, (0, 1)])
@pytest.mark.parametrize("name", OWN_NUMBERS)
def test_a_kernel_beside_numbers_of_its_own_keeps_its_fan_in(name, axis):
  rewrite = functools.partial(OWN_NUMBERS[name], axis=axis)
  params = {"one": shape(WIDTH, OUT), "many": shape(LAYERS, WIDTH, WIDTH)}

  def loss_fn(p, x):
    x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ rewrite(w)), None), x, p["many"])
    return jnp.sum(x @ rewrite(p["one"]))

  assert axes(loss_fn, params, ROWS) == {"one": ((0,), ()), "many": ((1,), (0,))}


@pytest.mark.parametrize(
  "rewrite",
  [
    lambda w: jnp.roll(w, 1, 0),
    lambda w: jnp.roll(w, 1, 1),
    lambda w: w[::-1],
    lambda w: w[np.array([2, 0, 1, 5, 4, 3])],
    lambda w: jnp.take_along_axis(w, np.ones((WIDTH, OUT), int), 0),
    lambda w: jnp.concatenate([w[:1], w[1:]]),
    lambda w: jnp.concatenate([w[:, :1], w[:, 1:]], 1),
  ],
)
def test_a_kernel_whose_entries_are_moved_keeps_its_fan_in(rewrite):
  params = {"kernel": shape(WIDTH, OUT)}
  assert axes(lambda p, x: jnp.sum(x @ rewrite(p["kernel"])), params, ROWS) == {
    "kernel": ((0,), ())
  }


def in_python(get):
  def run(w, x):
    for i in range(LAYERS):
      x = jnp.tanh(x @ get(w, i))
    return x

  return run


def in_scan(w, x, get=lambda w: w):
  return jax.lax.scan(lambda h, w: (jnp.tanh(h @ get(w)), None), x, w)[0]


def by_counter(w, x):
  return jax.lax.fori_loop(0, LAYERS, lambda i, h: jnp.tanh(h @ w[LAYERS - 1 - i]), x)


def as_layer_stack(w, x):
  """AlphaFold's: the body takes the layer of its number."""
  layer_of = functools.partial(jax.lax.dynamic_index_in_dim, w, axis=0, keepdims=False)
  return jax.lax.scan(lambda h, i: (jnp.tanh(h @ layer_of(i)), None), x, jnp.arange(LAYERS))[0]


def first_apart(w, x):
  return in_scan(w[1:], jnp.tanh(x @ w[0]))


def first_apart_unrolled(w, x):
  x, others = x @ w[0], w[1:]
  for i in range(LAYERS - 1):
    x = jnp.tanh(x @ others[i])
  return x


def centred_over_layers(w, x):
  mean = w.mean(0)
  return in_scan(w, x, lambda layer: layer - mean)


LOOPS = {
  "scan": in_scan,
  "scan of names": functools.partial(in_scan, get=lambda w: checkpoint_name(w, "kernel")),
  "counter": by_counter,
  "layer_stack": as_layer_stack,
  "index": in_python(lambda w, i: w[i]),
  "negative index": in_python(lambda w, i: w[i - LAYERS]),
  "take": in_python(lambda w, i: jnp.take(w, i, axis=0)),
  "iterator": in_python(lambda w, i: list(w)[i]),
  "unstack": in_python(lambda w, i: jnp.unstack(w)[i]),
  "slice": in_python(lambda w, i: w[i : i + 1].reshape(WIDTH, WIDTH)),
  "first apart": first_apart,
  "first apart, unrolled": first_apart_unrolled,
  "permuted": lambda w, x: in_scan(w[np.array([3, 1, 0, 2])], x),
  "restacked": lambda w, x: in_scan(jnp.stack([w[3], w[1], w[0], w[2]]), x),
  "centred over layers": centred_over_layers,
  "penalty": lambda w, x: in_scan(w, x) + 1e-3 * jnp.sum(w**2),
}


@pytest.mark.parametrize("name", LOOPS)
def test_kernels_that_are_taken_one_at_a_time_are_layers(name):
  params = {"w": shape(LAYERS, WIDTH, WIDTH), "head": shape(WIDTH, 2)}

  def loss_fn(p, x):
    return jnp.sum(LOOPS[name](p["w"], x) @ p["head"])

  assert axes(loss_fn, params, ROWS) == {"head": ((0,), ()), "w": ((1,), (0,))}


def test_kernels_of_which_one_use_takes_all_or_the_program_takes_a_few_are_one_layer():
  params = {"whole": shape(LAYERS, WIDTH, WIDTH), "few": shape(LAYERS, WIDTH, WIDTH)}

  def loss_fn(p, x):
    return jnp.sum(x @ p["whole"][0] + x @ p["whole"].sum(0) + x @ p["few"][1])

  assert axes(loss_fn, params, ROWS) == dict.fromkeys(params, ((1,), ()))


@pytest.mark.parametrize(
  "join", [jax.lax.complex, lambda re, im: re + 1j * im], ids=["complex", "sum"]
)
def test_the_parts_of_a_complex_kernel_are_one_layer(join):
  """The state spaces of S5 and the spectral layers of FNO have them along the last axis."""
  params = {"many": shape(LAYERS, WIDTH, WIDTH, 2), "one": shape(WIDTH, OUT, 2)}

  def loss_fn(p, x):
    kernel = lambda w: join(w[..., 0], w[..., 1])  # noqa: E731
    layer = lambda h, w: (jnp.tanh((h @ kernel(w)).real), None)  # noqa: E731
    return jnp.sum((jax.lax.scan(layer, x, p["many"])[0] @ kernel(p["one"])).real)

  assert axes(loss_fn, params, ROWS) == {"one": ((0,), ()), "many": ((1,), (0,))}


def test_the_axes_of_the_kernels_of_gpt_2_and_wav2vec2_by_their_shapes():
  """Flax models of transformers: a transposed kernel, and a convolution with normalized weights."""
  params = {
    "c_attn": {"kernel": shape(3 * WIDTH, WIDTH), "bias": shape(3 * WIDTH)},
    "conv": {"weight_v": shape(WIDTH, 3, 4), "weight_g": shape(1, 1, 4), "bias": shape(WIDTH)},
  }

  def loss_fn(p, x):
    conv = p["conv"]
    norm = jnp.linalg.norm(conv["weight_v"], axis=(0, 1))[None, None]
    kernel = (conv["weight_g"] * conv["weight_v"] / norm).transpose(2, 1, 0)
    numbers = ("NWC", "WIO", "NWC")
    y = jax.lax.conv_general_dilated(
      x, kernel, (1,), "SAME", dimension_numbers=numbers, feature_group_count=2
    )
    x += jax.nn.gelu(y + conv["bias"])
    return jnp.sum(jnp.tanh(x @ p["c_attn"]["kernel"].T + p["c_attn"]["bias"]))

  assert axes(loss_fn, params, SEQUENCES) == {
    "c_attn/bias": ((), ()),
    "c_attn/kernel": ((1,), ()),
    "conv/bias": ((), ()),
    "conv/weight_g": ((), ()),
    "conv/weight_v": ((1, 2), ()),
  }


def block_of(p, h, name):
  """A block with Haiku's names, whose kernels are `w` and whose biases are `b`."""
  hidden = jax.nn.gelu(h @ p["linear"]["w"] + p["linear"]["b"])
  return name(h + hidden @ p["linear_1"]["w"] + p["linear_1"]["b"])


def test_the_axes_of_layers_of_levanter_in_nested_scans_with_names_for_rematerialization():
  block = {
    "linear": {"w": shape(LAYERS, WIDTH, 8), "b": shape(LAYERS, 8)},
    "linear_1": {"w": shape(LAYERS, 8, WIDTH), "b": shape(LAYERS, WIDTH)},
  }
  params = {"stacked": block, "embed": shape(VOCAB, WIDTH)}
  name = functools.partial(checkpoint_name, name="carry")

  def inner(h, p):
    named = jax.tree.map(lambda w: checkpoint_name(w, "param"), p)
    return block_of(named, h, name), None

  def loss_fn(p, tokens):
    layers = jax.tree.map(lambda w: w.reshape(2, 2, *w.shape[1:]), p["stacked"])
    outer = jax.checkpoint(lambda h, p: jax.lax.scan(inner, h, p))
    h, _ = jax.lax.scan(outer, p["embed"][tokens], layers)
    return jnp.sum(h @ p["embed"].T)

  expected = {
    f"stacked/{module}/{leaf}": (fan_in, (0,))
    for module in block
    for leaf, fan_in in (("w", (1,)), ("b", ()))
  }
  assert axes(loss_fn, params, TOKENS) == expected | {"embed": ((), ())}


def test_lars_gives_a_table_that_the_program_indexes_one_ratio():
  rng = np.random.default_rng(0)
  shapes = {"table": (8, WIDTH), "head": (WIDTH, 2)}
  params = {name: rng.normal(size=sizes).astype(np.float32) for name, sizes in shapes.items()}
  x = rng.normal(size=(3, LENGTH, WIDTH)).astype(np.float32)

  def loss_fn(p, x):
    return jnp.mean((jnp.tanh(x + p["table"][jnp.arange(LENGTH)]) @ p["head"] - 1) ** 2)

  tx = optax_boost.lars(1.0, momentum=None, weight_decay=0.0, trust_coefficient=1.0, eps=0.0)
  step = optax_boost.make_train_step(loss_fn, tx, donate=False)
  state, _ = step(step.init(params), x)
  hidden = np.tanh(x.astype(float) + params["table"][:LENGTH])
  error = 2 * (hidden @ params["head"] - 1) / (3 * LENGTH * 2)
  grad = np.zeros((8, WIDTH))
  grad[:LENGTH] = ((error @ params["head"].T) * (1 - hidden**2)).sum(0)
  ratio = np.linalg.norm(params["table"]) / np.linalg.norm(grad)
  expected = params["table"] - ratio * grad
  # Both sides sum 21 rows; their norms are near 7.
  np.testing.assert_allclose(
    state.params["table"], expected, rtol=0, atol=256 * np.finfo(np.float32).eps
  )
