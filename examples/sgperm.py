"""Trains a network without changing any weight, by permuting them, and compares with Adam.

`python examples/sgperm.py` takes scikit-learn's digits; `--data mnist.npz` takes other images. It
trains with SGPerm as published (exact), its two faster variants, LaPerm, Adam, and one after the
other; prints accuracies, saves a picture of them, and saves the model of the first method that only
permutes as a seed and integers.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import itertools
from pathlib import Path
import time
from typing import NamedTuple

from _data import KEYS, Data, Part, digits, from_npz
from _pictures import check_writable, save
import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
import optax
from tqdm import tqdm

import optax_boost

STEPS = 400  # about as many are made where the number of epochs is left open
ACCURACY = "test accuracy, %"
# Okabe and Ito's colours, told apart by colour-blind eyes too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#5A5A5A", "#E69F00")

Params = dict[str, jax.Array]


class Method(NamedTuple):
  """What trains.

  Attributes:
    description: what it is, in a few words.
    make: makes the transformation from the number of steps and a setting.
    digits: the setting for digits.
    others: the setting for other images.
    permutes: whether what it trains is, at the end, a permutation of the initial weights.
  """

  description: str
  make: Callable[..., optax.GradientTransformation]
  digits: Mapping[str, float]
  others: Mapping[str, float]
  permutes: bool = True


def _sgperm(method: str) -> Callable[..., optax.GradientTransformation]:
  return lambda steps, **setting: optax_boost.sgperm(method=method, key=0, **setting)


def _adam(steps: int, peak: float, falls: bool) -> optax.GradientTransformation:
  return optax.adam(optax.cosine_decay_schedule(peak, steps) if falls else peak)


def _laperm(steps: int, sync_every: int, **setting: float) -> optax.GradientTransformation:
  return optax_boost.laperm(_adam(steps, **setting), sync_every=sync_every)


def _pairs_then_adam(
  steps: int, peak: float, falls: bool, **setting: float
) -> optax.GradientTransformation:
  pairs = _sgperm("pairs")(steps, **setting)
  return optax_boost.switch_after(steps // 2, pairs, _adam(steps, peak, falls))


_PAIRS = {"alpha": 0.4, "alpha_min": 0.01, "momentum": 0.8}
_PAIRS_OTHERS = {"alpha": 0.2, "alpha_min": 0.01, "momentum": 0.9}
_ADAM = {"peak": 0.01, "falls": False}
_ADAM_OTHERS = {"peak": 0.01, "falls": True}
# tests/evidence/test_sgperm_evidence.py chose the settings, on validation images of digits and of
# MNIST, for 400 steps.
METHODS = {
  "exact": Method(
    "SGPerm as published",
    _sgperm("exact"),
    {"alpha": 0.2, "alpha_min": 0.005, "momentum": 0.8},
    {"alpha": 0.2, "alpha_min": 0.005, "momentum": 0.95},
  ),
  "pairs": Method("drawn pairs of weights swap", _sgperm("pairs"), _PAIRS, _PAIRS_OTHERS),
  "rank": Method(
    "weights handed out by rank",
    _sgperm("rank"),
    {"alpha": 0.4, "alpha_min": 0.005, "momentum": 0.8},
    {"alpha": 0.2, "alpha_min": 0.005, "momentum": 0.95},
  ),
  "laperm": Method(
    "Adam, brought back to a permutation every few steps",
    _laperm,
    {"peak": 0.03, "falls": False, "sync_every": 5},
    {"peak": 0.01, "falls": True, "sync_every": 25},
  ),
  "adam": Method("free weights", _adam, _ADAM, _ADAM_OTHERS, permutes=False),
  "pairs, adam": Method(
    "pairs for the first half, then Adam with warm moments",
    _pairs_then_adam,
    {**_PAIRS, **_ADAM},
    {**_PAIRS_OTHERS, **_ADAM_OTHERS},
    permutes=False,
  ),
}


def initial_params(sizes: Sequence[int], seed: int) -> Params:
  """Kernels from Glorot's uniform distribution.

  There are no biases: biases that start at zero are all equal, with nothing to permute.

  Args:
    sizes: the widths of the layers, the images' pixels first and the classes last.
    seed: of the weights.

  Returns:
    The kernels, (in, out) each.
  """
  make = jax.nn.initializers.glorot_uniform()
  keys = jax.random.split(jax.random.key(seed), len(sizes) - 1)
  shapes = itertools.pairwise(sizes)
  pairs = enumerate(zip(keys, shapes, strict=True))
  return {f"layer_{i}": make(key, shape) for i, (key, shape) in pairs}


def logits(params: Params, x: jax.Array) -> jax.Array:
  """Maps rows of pixels to rows of logits."""
  *hidden, last = params.values()
  for kernel in hidden:
    x = jax.nn.relu(x @ kernel)
  return x @ last


def loss_fn(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
  """Mean cross-entropy."""
  return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y))


@jax.jit
def _right(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
  return jnp.mean(jnp.argmax(logits(params, x), -1) == y)


def accuracy(params: Params, part: Part) -> float:
  """The share of images that are classified rightly, in percent."""
  return 100 * float(_right(params, part.images, part.labels))


def make_step(tx: optax.GradientTransformation) -> Callable:
  """One training step, jitted: params, state, images and labels to params, state and loss."""

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, x, y):
    loss, gradients = jax.value_and_grad(loss_fn)(params, x, y)
    # `optax.apply_updates` would end within one rounding of the initial values.
    params, state = optax_boost.apply_gradients(tx, gradients, state, params)
    return params, state, loss

  return step


def batches(part: Part, batch_size: int, key: jax.Array) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Endless batches, shuffled again for each epoch from a key; what is left over sits out."""
  epoch, size = 0, len(part.labels)
  while True:
    order = np.asarray(jax.random.permutation(jax.random.fold_in(key, epoch), size))
    for start in range(0, size - batch_size + 1, batch_size):
      rows = order[start : start + batch_size]
      yield part.images[rows], part.labels[rows]
    epoch += 1


class History(NamedTuple):
  """The results of a run, with one number every few steps.

  Attributes:
    loss: the mean training loss since the number before.
    accuracy: on the test part, in percent.
    seconds: per step, since the number before.
  """

  loss: list[float]
  accuracy: list[float]
  seconds: list[float]


def fit(
  params: Params,
  tx: optax.GradientTransformation,
  step: Callable,
  permutes: bool,
  data: Data,
  batch_size: int,
  marks: Sequence[int],
  key: jax.Array,
  bar: tqdm,
) -> tuple[Params, optax.OptState, History]:
  """Trains, and measures on the test part now and then.

  Args:
    params: the initial params.
    tx: the transformation.
    step: from :func:`make_step`.
    permutes: whether to measure the permutation in the state. LaPerm's params are one now and then.
    data: the images.
    batch_size: images in a batch.
    marks: after how many steps to measure; the last is the end.
    key: shuffles the images.
    bar: counts the steps.

  Returns:
    The trained params, the state, and the history.
  """
  params = jax.tree.map(jnp.array, params)  # The step takes over the memory of what it is given.
  state, feed, done = tx.init(params), batches(data.train, batch_size, key), 0
  history = History([], [], [])
  for mark in marks:
    chosen = [next(feed) for _ in range(done, mark)]
    losses, begin = [], time.perf_counter()
    for x, y in chosen:
      params, state, loss = step(params, state, x, y)
      losses.append(loss)
    jax.block_until_ready(params)
    history.seconds.append((time.perf_counter() - begin) / (mark - done))
    model = optax_boost.permuted_params(state).params if permutes else params
    history.loss.append(float(np.mean(jax.device_get(losses))))
    history.accuracy.append(accuracy(model, data.test))
    bar.update(mark - done)
    done = mark
  return model, state, history


def flattened(data: Data) -> Data:
  """Images as rows of pixels between 0 and 1, for which the settings were chosen."""
  low, high = data.train.images.min(), data.train.images.max()

  def part(given: Part) -> Part:
    rows = given.images.reshape(len(given.images), -1)
    return Part(((rows - low) / (high - low)).astype(np.float32), given.labels)

  return Data(data.name, data.classes, part(data.train), part(data.test))


def table(histories: dict[str, list[History]], marks: Sequence[int]) -> str:
  """Mean test accuracy and its spread over the seeds at some of the steps, and what a step took."""
  points = sorted({max(1, round(len(marks) * share)) - 1 for share in (1 / 8, 1 / 4, 1 / 2, 1)})
  heads = [f"step {marks[i]}" for i in points]
  width = max(map(len, [ACCURACY, *histories]))
  lines = [f"{ACCURACY:{width}}" + "".join(f"{head:>16}" for head in heads) + "  ms per step"]
  for name, runs in histories.items():
    rows = np.array([run.accuracy for run in runs])[:, points]
    spreads = [f" +- {one.std():.1f}" if len(runs) > 1 else "" for one in rows.T]
    cells = [f"{one.mean():.1f}{spread}" for one, spread in zip(rows.T, spreads, strict=True)]
    # The first points compile.
    milliseconds = 1e3 * np.median([run.seconds for run in runs])
    line = "".join(f"{cell:>16}" for cell in cells)
    lines.append(f"{name:{width}}{line}  {milliseconds:11.2f}")
  return "\n".join(lines)


def picture(histories: dict[str, list[History]], marks: Sequence[int], title: str) -> Figure:
  """Draws test accuracy against steps: the mean over the seeds, and one standard deviation."""
  figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
  axes = figure.subplots()
  lowest, highest = 100.0, 0.0
  for (name, runs), colour in zip(histories.items(), itertools.cycle(COLOURS), strict=False):
    rows = np.array([run.accuracy for run in runs])
    mean, spread = rows.mean(0), rows.std(0)
    style = "-" if METHODS[name].permutes else "--"
    axes.plot(marks, mean, style, color=colour, linewidth=2, label=f"{name}: {mean[-1]:.1f}")
    axes.fill_between(marks, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)
    # What comes before an eighth of the run would press the rest together.
    lowest = min(lowest, mean[len(marks) // 8 :].min())
    highest = max(highest, (mean + spread).max())
  axes.set(xlim=(0, marks[-1]), ylim=(max(0, lowest - 2), min(100, highest + 1)))
  axes.set(xlabel="training steps", ylabel=ACCURACY)
  axes.set_title(title, loc="left")
  axes.grid(color="#E5E5E5")
  axes.spines[["top", "right"]].set_visible(False)
  title = "dashed: free weights\nnumbers: at the end"
  figure.legend(loc="outside right upper", title=title, frameon=False)
  return figure


def _parser() -> argparse.ArgumentParser:
  methods = "\n".join(f"  {name:12} {method.description}" for name, method in METHODS.items())
  parser = argparse.ArgumentParser(
    description=__doc__.partition("\n")[0],
    epilog=f"methods:\n{methods}",
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add("--data", metavar="FILE", help=f"npz file with {', '.join(KEYS)}; default: digits")
  add("--methods", nargs="+", metavar="METHOD", default=list(METHODS), help="default: all of them")
  add("--hidden", type=int, nargs="+", default=[100], help="widths of the hidden layers")
  add("--epochs", type=int, help=f"default: as many as make about {STEPS} steps")
  add("--batch-size", type=int, help="default: 64 of digits, else 128")
  add("--seeds", type=int, default=3, help="how many; default: 3")
  add("--out", type=Path, default=Path("out/sgperm.png"), help="the picture")
  add("--model", type=Path, default=Path("out/sgperm.npz"), help="the model of integers")
  return parser


def main(arguments: list[str] | None = None) -> None:
  """Trains with each method and each seed, prints the table, saves picture and model."""
  parser = _parser()
  options = parser.parse_args(arguments)
  for name in options.methods:
    if name not in METHODS:
      parser.error(f"unknown method '{name}'; choose from {', '.join(METHODS)}")
  methods = {name: METHODS[name] for name in options.methods}
  positive = {"epochs": options.epochs, "batch-size": options.batch_size, "seeds": options.seeds}
  for name, values in {**positive, "hidden": min(options.hidden)}.items():
    if values is not None and values < 1:
      parser.error(f"--{name} must be at least 1; got {values}")
  try:
    data = flattened(digits() if options.data is None else from_npz(options.data))
    check_writable(options.out)
    if options.model.suffix != ".npz" or options.model.is_dir():
      raise ValueError(f"--model {options.model} must be a file that ends in .npz")
    options.model.parent.mkdir(parents=True, exist_ok=True)
  except (OSError, ValueError) as error:
    parser.error(str(error))
  images = len(data.train.labels)
  batch_size = min(64 if options.data is None else 128, images)
  batch_size = batch_size if options.batch_size is None else options.batch_size
  if batch_size > images:
    parser.error(f"--batch-size {batch_size} is more than the {images} training images")

  per_epoch = images // batch_size
  steps = (options.epochs or max(1, round(STEPS / per_epoch))) * per_epoch
  every = max(1, steps // 16)
  marks = [*range(every, steps, every), steps]
  sizes = [data.train.images.shape[1], *options.hidden, data.classes]
  print(
    f"{data.name}: {images:,} training and {len(data.test.labels):,} test images; a network of"
    f" {'-'.join(map(str, sizes))};\n{steps} steps in batches of {batch_size}, seeds:"
    f" {options.seeds}, on {jax.default_backend()}",
    flush=True,
  )

  histories, kept = {}, None
  with tqdm(total=steps * len(methods) * options.seeds, unit="step") as bar:
    for name, method in methods.items():
      setting = method.digits if options.data is None else method.others
      tx = method.make(steps, **setting)
      step = make_step(tx)
      histories[name] = []
      for seed in range(options.seeds):
        bar.set_description(f"{name}, seed {seed}")
        start, key = initial_params(sizes, seed), jax.random.key(seed)
        model, state, history = fit(
          start, tx, step, method.permutes, data, batch_size, marks, key, bar
        )
        histories[name].append(history)
        if kept is None and method.permutes:
          kept = name, model
          optax_boost.permuted_params(state).save(options.model)
  print(f"\n{table(histories, marks)}")

  if kept is not None:
    name, model = kept
    again = optax_boost.PermutedParams.load(options.model, initial_params(sizes, seed=0)).params
    same = all(np.array_equal(model[layer], again[layer]) for layer in model)
    print(
      f"\n{options.model}: seed 0 and {sum(x.size for x in model.values()):,} integers, the model"
      f" of {name};\nmade again from them, its weights are"
      f" {'the same to the last bit' if same else 'OTHERS'}: {accuracy(again, data.test):.1f} %"
    )

  title = f"{'-'.join(map(str, sizes))} on {data.name}, batches of {batch_size}"
  save(picture(histories, marks, title), options.out)
  print(f"\nThe picture is in {options.out}")


if __name__ == "__main__":
  main()
