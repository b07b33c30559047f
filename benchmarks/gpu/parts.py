"""The parts of the table, most wanted first; each yields its rows as they are measured."""

from collections.abc import Callable, Iterator
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import models
from benchmarks.gpu import sizes, timing
import optax_boost
import optax_boost.linen

_WINDOW = 4
Rows = Iterator[tuple[str, timing.Record]]


def frozen(of: sizes.Sizes, speed: float) -> Rows:
  """GPT-2's step with the first half of its blocks frozen, by `freeze_layers` and by optax."""
  del speed
  adamw = optax.adamw(1e-4)
  tokens = _tokens(of.gpt2.vocabulary, *of.tokens)
  shapes = jax.eval_shape(of.gpt2.init, jax.random.key(0))
  for form, tree in (
    ("blocks written out", jax.eval_shape(of.gpt2.unstacked, shapes)),
    ("in a scan", shapes),
  ):
    params = timing.filled(tree)
    blocks = "blocks[*]" if "blocks" in params else "block_*"
    names = ["tokens|positions", blocks, "norm"]
    groups = optax_boost.layer_groups(params, names, num_groups=2)
    half = optax_boost.freeze_layers(adamw, groups, optax_boost.fixed_freezing(2, 1))
    for name, tx in {"AdamW": adamw, "half frozen, freeze_layers": half}.items():
      made = optax_boost.make_train_step(of.gpt2.loss, tx)
      yield f"{form}: {name}", timing.train_step(made, made.init(params), tokens, of.calls)
    name, tx = _half_by_optax(of.gpt2, params, adamw)
    plain = timing.plain_step(of.gpt2.loss, tx)
    state = (jax.tree.map(jnp.copy, params), tx.init(params))
    yield f"{form}: half frozen, {name}", timing.train_step(plain, state, tokens, of.calls)


def _half_by_optax(
  model: models.GPT2, params: dict[str, Any], adamw: optax.GradientTransformation
) -> tuple[str, optax.GradientTransformation]:
  """What a user of optax takes to freeze the embeddings and the first half of the blocks."""
  half = model.layers // 2
  if "blocks" not in params:
    earlier = {"tokens", "positions", *(f"block_{i:02d}" for i in range(half))}
    labels = {name: "frozen" if name in earlier else "trained" for name in params}
    kinds = {"trained": adamw, "frozen": optax.set_to_zero()}
    return "optax.partition", optax.partition(kinds, labels)

  def zero(updates: Any, params: Any = None) -> Any:
    del params
    blocks = jax.tree.map(lambda u: u.at[:half].set(0), updates["blocks"])
    tables = {name: jnp.zeros_like(updates[name]) for name in ("tokens", "positions")}
    return updates | tables | {"blocks": blocks}

  return "updates set to zero", optax.chain(adamw, optax.stateless(zero))


def backward(of: sizes.Sizes, speed: float) -> Rows:
  """GPT-2's step with each layer's update inside of the backward pass, and after it."""
  del speed
  tokens = _tokens(of.gpt2.vocabulary, *of.tokens)
  for name, inside in {"AdamW, update_in_backward": True, "AdamW": False}.items():
    made = optax_boost.make_train_step(of.gpt2.loss, optax.adamw(1e-4), update_in_backward=inside)
    yield name, _in_memory(made, of, tokens, of.calls)


def windows(of: sizes.Sizes, speed: float) -> Rows:
  """GPT-2's micro-batches, added to their window inside of the backward pass, and after it."""
  del speed
  count, length = of.tokens
  tokens = _tokens(of.gpt2.vocabulary, max(1, count // _WINDOW), length)
  for not_finite in ("restart", "drop"):
    tx = optax_boost.accumulate(optax.adamw(1e-4), _WINDOW, not_finite=not_finite)
    made = optax_boost.make_train_step(of.gpt2.loss, tx)
    yield f'accumulate(AdamW, 4), "{not_finite}"', _in_memory(made, of, tokens, _WINDOW * of.calls)


def _in_memory(made: Any, of: sizes.Sizes, tokens: jax.Array, calls: int) -> timing.Record:
  """Measures a train step, and the most memory that the process has had in use."""
  shapes = jax.eval_shape(of.gpt2.init, jax.random.key(0))
  # `init` would copy the params, so that the peak could be its own. These states begin with zeros.
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(made.init, shapes))
  state = zeros._replace(params=timing.filled(shapes))
  del zeros
  return timing.train_step(made, state, tokens, calls) | timing.peak_memory()


def wrappers(of: sizes.Sizes, speed: float) -> Rows:
  """Adam's step on GPT-2's params within a wrapper, beside what optax has for the same."""
  params = timing.filled(jax.eval_shape(of.gpt2.init, jax.random.key(0)))
  size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  adam = optax.adam(1e-3)
  # Adam reads gradient, params and both moments, and writes all but the gradient. A window of four
  # reads four gradients, and three times reads and writes their sum. A check reads gradients again.
  window, checked, averaged = 4 * size, 8 * size, 9 * size
  rows: dict[str, timing.Contender] = {
    "optax.adam": timing.theirs(adam),
    "accumulate(adam, 4)": timing.ours(optax_boost.accumulate(adam, 4), window),
    "optax.MultiSteps(adam, 4)": timing.theirs(
      optax.MultiSteps(adam, 4).gradient_transformation(), window
    ),
    "dynamic_loss_scale(adam)": timing.ours(optax_boost.dynamic_loss_scale(adam), checked),
    "optax.apply_if_finite(adam)": timing.theirs(optax.apply_if_finite(adam, 5), checked),
    "average_params(adam)": timing.ours(optax_boost.average_params(adam, decay=0.99), averaged),
    "adam, then optax.incremental_update": _averaged_by_hand(adam, averaged),
  }
  for name, contender in rows.items():
    yield name, timing.optimizer_steps(contender, params, speed, of.steps)
  # Masters and moments in float32, read and written; gradients and params in bfloat16.
  masters = timing.ours(optax_boost.master_weights(adam), 7 * size)
  yield "master_weights(adam)", timing.optimizer_steps(masters, half, speed, of.steps)
  row = timing.optimizer_steps(_cast_by_hand(adam, 7 * size), params, speed, of.steps, half)
  yield "adam in float32, params cast to bfloat16", row


def _averaged_by_hand(adam: optax.GradientTransformation, moved: float) -> timing.Contender:
  def step(params: Any, state: Any, grads: Any) -> Any:
    inner, average = state
    updates, inner = adam.update(grads, inner, params)
    params = optax.apply_updates(params, updates)
    return params, (inner, optax.incremental_update(params, average, 0.01))

  return timing.Contender(lambda params: (adam.init(params), params), step, moved)


def _cast_by_hand(adam: optax.GradientTransformation, moved: float) -> timing.Contender:
  def cast(params: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

  def step(params: Any, state: Any, grads: Any) -> Any:
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    updates, inner = adam.update(wide, state[0], params)
    params = optax.apply_updates(params, updates)
    return params, (inner, cast(params))

  return timing.Contender(lambda params: (adam.init(params), cast(params)), step, moved)


def lars(of: sizes.Sizes, speed: float) -> Rows:
  """LARS on ResNet-50's leaves."""
  x = jnp.zeros((1, 64, 64, 3))
  params = timing.filled(jax.eval_shape(of.resnet.init, jax.random.key(0), x)["params"])
  size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  rows = {
    "optax.sgd": timing.theirs(optax.sgd(0.1, momentum=0.9)),
    # Norms need all of params and gradients before the step reads them again.
    "lars": timing.ours(optax_boost.lars(0.1, weight_decay=1e-4), 7 * size),
    "optax.lars": timing.theirs(optax.lars(0.1, weight_decay=1e-4), 7 * size),
  }
  for name, contender in rows.items():
    yield name, timing.optimizer_steps(contender, params, speed, of.steps)


def sequences(of: sizes.Sizes, speed: float) -> Rows:
  """A step of transformers on the same tokens, cut into shorter and shorter sequences."""
  del speed
  for width, lengths in of.cut_lengths.items():
    model = dataclasses.replace(of.cut, width=width, heads=max(1, width // 64))
    params = timing.filled(jax.eval_shape(model.init, jax.random.key(0)))
    made = optax_boost.make_train_step(model.loss, optax.adamw(1e-4))
    whole: float | None = None
    for length in lengths:
      batch = _tokens(model.vocabulary, of.cut_tokens // length, length)
      record = timing.train_step(made, made.init(params), batch, of.calls)
      whole = whole or record["ms"]
      name = f"width {width}: {len(batch)} sequences of {length:,}, L / 6d {length / 6 / width:.2f}"
      yield name, record | {"of the first": record["ms"] / whole}


class _Images:
  """The network of images with its batch."""

  def __init__(self, of: sizes.Sizes):
    self.calls = of.calls
    count, side = of.images
    rng = np.random.default_rng(0)
    self.batch = {
      "x": jnp.asarray(rng.standard_normal((count, side, side, 3), np.float32), of.resnet.dtype),
      "y": jnp.asarray(rng.integers(0, of.resnet.classes, count)),
    }
    self.module = of.resnet

  def shapes(self, module: Any) -> Any:
    return jax.eval_shape(module.init, jax.random.key(0), self.batch["x"])

  def half(self, tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The optimizer with the first half of the network frozen."""
    return optax_boost.freeze_layers(tx, models.HALVES, optax_boost.fixed_freezing(2, 1))

  def step(self, module: Any, tx: optax.GradientTransformation) -> timing.Record:
    variables = timing.filled(self.shapes(module))
    loss, *arrays = optax_boost.linen.split_loss(models.image_loss, module, variables)
    made = optax_boost.make_train_step(loss, tx)
    return timing.train_step(made, made.init(*arrays), self.batch, self.calls)


def resnet50(of: sizes.Sizes, speed: float) -> Rows:
  """AutoBoost's levels on the network of images."""
  del speed
  images = _Images(of)
  sgd = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.01, momentum=0.9))
  boosted = optax.chain(optax_boost.centralize(), sgd)
  yield "O0", images.step(images.module, sgd)
  yield "first half frozen", images.step(images.module, images.half(sgd))
  boost = optax_boost.auto_boost("O1", total_steps=100)
  fewer = boost.model(optax_boost.linen.less_bn, images.module, images.batch["x"])
  unfrozen = images.step(fewer, boosted)
  yield "O1's and O2's first steps: fewer BatchNorms, centralized", unfrozen
  last = images.step(fewer, images.half(boosted))
  yield "their last steps: the same, first half frozen", last
  for level, share in (("O1", 0.3), ("O2", 0.45)):
    mean = (1 - share) * unfrozen["ms"] + share * last["ms"]
    yield f"{level}: the mean of a training, from these", {"ms": mean}


def dim_reduce(of: sizes.Sizes, speed: float) -> Rows:
  """Training in a subspace, of a loss that costs nothing."""
  for size in of.subspaces:
    side = round((size / 10) ** 0.5)
    params = [jnp.zeros((side, side))] * 10
    name, total = f"{10 * side * side:,} params", 40 * side * side
    sgd = timing.theirs(optax.sgd(0.1, 0.9))
    yield f"{name}: optax.sgd", timing.optimizer_steps(sgd, params, speed, of.steps)
    basis = [jnp.zeros((of.components, *p.shape), p.dtype) for p in params]
    variance = jnp.ones(of.components)
    subspace = optax_boost.Subspace(params, basis, variance, variance)
    tx = optax_boost.dim_reduce(subspace)
    value_fn = lambda point: point[0][0, 0]  # noqa: E731  # a loss that costs nothing
    moved = total * (2 * of.components + 7)
    contender = timing.ours(tx, moved, value=jnp.zeros([]), value_fn=value_fn)
    yield f"{name}: dim_reduce", timing.optimizer_steps(contender, params, speed, of.steps)


def adasum(of: sizes.Sizes, speed: float) -> Rows:
  """The replicas' gradients on one device, summed by AdaSum and averaged."""
  replicas, size = of.replicas
  params = {"kernel": jnp.zeros(size)}
  grads = timing.filled({"kernel": jax.ShapeDtypeStruct((replicas, size), jnp.float32)})
  means: dict[str, tuple[Callable[[Any], Any], int]] = {
    "jnp.mean": (lambda g: jax.tree.map(lambda x: jnp.mean(x, 0), g), replicas + 1),
    # Dot products need all gradients before they are combined.
    "adasum_reduce": (optax_boost.adasum_reduce, 2 * replicas + 1),
  }
  for name, (reduce, passes) in means.items():
    step = functools.partial(_reduced, reduce)
    contender = timing.Contender(lambda params: (), step, 4 * size * passes)
    row = timing.optimizer_steps(contender, params, speed, of.steps, grads)
    yield f"{replicas} replicas of {size:,} params: {name}", row


def _reduced(reduce: Callable[[Any], Any], params: Any, state: Any, grads: Any) -> Any:
  del params
  return reduce(grads), state


def sgperm(of: sizes.Sizes, speed: float) -> Rows:
  """SGPerm's kernels, the slowest to compile last."""
  params = timing.filled([jax.ShapeDtypeStruct(shape, jnp.float32) for shape in of.permuted])
  methods: dict[str, Callable[[], timing.Contender]] = {
    "optax.adam": lambda: timing.theirs(optax.adam(1e-3)),
    "pairs": lambda: timing.ours(optax_boost.sgperm(method="pairs", key=0)),
    "laperm(adam)": lambda: timing.ours(optax_boost.laperm(optax.adam(1e-3), 20)),
    "rank": lambda: timing.ours(optax_boost.sgperm(method="rank")),
    "exact, on the device": lambda: timing.ours(optax_boost.sgperm(key=0, backend="device")),
  }
  for name, make in methods.items():
    yield name, timing.optimizer_steps(make(), params, speed, of.steps)


def _tokens(vocabulary: int, count: int, length: int) -> jax.Array:
  return jnp.asarray(np.random.default_rng(0).integers(0, vocabulary, (count, length + 1)))


PARTS: dict[str, Callable[[sizes.Sizes, float], Rows]] = {
  "frozen": frozen,
  "backward": backward,
  "windows": windows,
  "wrappers": wrappers,
  "lars": lars,
  "sequences": sequences,
  "resnet50": resnet50,
  "dim_reduce": dim_reduce,
  "adasum": adasum,
  "sgperm": sgperm,
}


def run(part: str, small: bool) -> Rows:
  """Yields the device's name and its speed, then the rows of a part; for a process of its own."""
  of = sizes.small() if small else sizes.large()
  speed = timing.copy_speed(of.copied)
  yield jax.devices()[0].device_kind, {"GB/s": speed / 1e9}
  yield from PARTS[part](of, speed)
