"""LaPerm's own claims: sparse weights and weights of one magnitude, trained by reconnection.

``make evidence PARTS=laperm`` trains CNNs on MNIST and CIFAR-10, and the paper's two networks whose
weights are one value or zero. Weights only ever change places in the weight vector of an output.
Each model is saved as a seed and integers, loaded again, and compared with files of float32.
"""

import functools
import pathlib
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from tests.evidence import common, report, runs

pytestmark = pytest.mark.slow
SEEDS = (0, 1, 2)


class Task(NamedTuple):
  """A network, its data and its training.

  Attributes:
    data: as in `common.images`.
    halved: as there.
    kernels: shapes of the kernels: convolutions that keep the size, then dense layers.
    pooled: the convolutions after which squares of four are reduced to their maximum.
    steps: batches.
    batch: images in a batch.
  """

  data: str
  halved: bool
  kernels: tuple[tuple[int, ...], ...]
  pooled: tuple[int, ...]
  steps: int
  batch: int


TASKS = {
  "MNIST": Task("mnist", True, ((3, 3, 1, 8), (3, 3, 8, 16), (784, 64), (64, 10)), (0,), 1000, 32),
  "CIFAR-10": Task(
    "cifar10",
    True,
    ((3, 3, 3, 12), (3, 3, 12, 12), (3, 3, 12, 24), (3, 3, 24, 24), (384, 64), (64, 10)),
    (0, 2),
    1000,
    32,
  ),
  "F1": Task("mnist", False, ((784, 10),), (), 3000, 128),
  "F2": Task("mnist", False, ((784, 128), (128, 64), (64, 10)), (), 3000, 128),
}
CNNS = ("MNIST", "CIFAR-10")
# Shares of weights that are not zero, and the value of all others, in the paper's two networks.
ONE_VALUE = {"F1": ((4 / 7,), 0.08), "F2": ((1 / 15, 1 / 7, 1 / 3), 0.03)}
# Initial weights: the share that is not zero, random signs times one number, or one value.
STARTS = ("dense", "50 %", "30 %", "10 %", "signs")
# The paper's code keeps more of the first layer.
FIRST_LAYER = 0.8
LAPERM, ADAM, HELD = "LaPerm", "Adam", "Adam, zeros held"


class Setting(NamedTuple):
  """A contender's task, initial weights, method and hyperparameters.

  Attributes:
    task: of `TASKS`.
    start: of `STARTS`, or ``"one value"``.
    method: `LAPERM`, `ADAM`, or `HELD`: Adam on the weights that are not zero.
    rate: Adam's peak; it falls to 0 as a cosine.
    every: of LaPerm, the steps between synchronizations in the first half of the training.
    later: in the second half.
  """

  task: str
  start: str
  method: str
  rate: float
  every: int = 0
  later: int = 0


PERIODS = ((5, 5), (20, 20), (20, 100))
_ADAM_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
RATES = {LAPERM: (3e-3, 1e-2, 3e-2, 1e-1), ADAM: _ADAM_RATES, HELD: _ADAM_RATES}
PAPER = {"F1": 85.46, "F2": 78.14}


def contenders(task):
  """By initial weights and method, the settings among which one is chosen."""
  pairs = [("dense", ADAM), ("10 %", HELD), *((start, LAPERM) for start in STARTS)]
  if task in ONE_VALUE:
    pairs = [("dense", ADAM), ("one value", LAPERM)]
  return {
    (start, method): [
      Setting(task, start, method, rate, *period)
      for rate in RATES[method]
      for period in (PERIODS if method == LAPERM else [(0, 0)])
    ]
    for start, method in pairs
  }


def data(task):
  """The parts of a task's data; pixels from 0 to 1 for weights of one value, as in the paper."""
  return common.images(TASKS[task].data, TASKS[task].halved, unit=task in ONE_VALUE)


def initial(task, start, seed):
  """Kernels from He's uniform distribution, with zeros, of one magnitude, or of one value.

  Zeros are drawn; the others grow, so that a layer's variance stays. Random signs are times the
  same number in all layers: a network of rectified layers without biases is the same function up
  to a factor of its logits as with He's deviation in each.
  """
  rng = np.random.default_rng(seed)
  shapes = TASKS[task].kernels
  fans = np.array([np.prod(shape[:-1]) for shape in shapes])
  magnitude = np.exp(np.mean(np.log(np.sqrt(2 / fans))))
  kernels = {}
  for i, (shape, fan) in enumerate(zip(shapes, fans, strict=True)):
    if start == "one value":
      shares, value = ONE_VALUE[task]
      kernel = np.where(rng.random(shape) < shares[i], value, 0)
    elif start == "signs":
      kernel = rng.choice([-magnitude, magnitude], shape)
    else:
      share = 1 if start == "dense" else int(start.split()[0]) / 100
      share = max(share, FIRST_LAYER) if i == 0 else share
      kernel = rng.uniform(-1, 1, shape) * np.sqrt(6 / fan / share)
      kernel = np.where(rng.random(shape) < share, kernel, 0)
    kernels[f"layer_{i}"] = jnp.asarray(kernel, jnp.float32)
  return kernels


@functools.cache
def programs(task, reconnects):
  """The optimizer's `init`, the step and the prediction, compiled once for all settings."""

  def transformation(rate, every):
    adam = optax.adam(rate)
    return optax_boost.laperm(adam, lambda count: every) if reconnects else adam

  @jax.jit
  def logits_of(params, x):
    return common.rectified(params, x, "SAME", TASKS[task].pooled)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, held, x, y, rate, every):
    grads = jax.grad(lambda params: common.cross_entropy(logits_of(params, x), y))(params)
    tx = transformation(rate, every)
    if reconnects:
      return optax_boost.apply_gradients(tx, grads, state, params)
    updates, state = tx.update(grads, state)
    updates = jax.tree.map(lambda u, zero: jnp.where(zero, 0, u), updates, held)
    return optax.apply_updates(params, updates), state

  return transformation(0.0, 1).init, step, logits_of


def train(setting, seed):
  """Accuracy on validation images, of reported seeds on test images, and the sizes of files."""
  task, ours = TASKS[setting.task], setting.method == LAPERM
  init, step, predict = programs(setting.task, ours)
  start = initial(setting.task, setting.start, seed)
  held = jax.tree.map(lambda kernel: (kernel == 0) & (setting.method == HELD), start)
  params = jax.tree.map(jnp.array, start)
  state = init(params)
  parts = data(setting.task)
  batches = common.batches(*parts["train"], task.batch, np.random.default_rng(seed))
  for count in range(task.steps):
    rate = np.float32(setting.rate * (1 + np.cos(np.pi * count / task.steps)) / 2)
    every = np.int32(setting.every if count < task.steps // 2 else setting.later)
    params, state = step(params, state, held, *next(batches).values(), rate, every)
  model = optax_boost.permuted_params(state).params if ours else params
  part = "validation" if seed == runs.TUNING_SEED else "test"
  result = {part: common.scores(functools.partial(predict, model), *parts[part])["accuracy"]}
  if ours and part == "test":
    common.assert_permuted(start, model)
    result["bytes"] = sizes(setting, start, model, state)
  return result


def sizes(setting, start, model, state):
  """Bytes on disk of a model as a seed and integers, loaded again to the last bit, and others."""
  arrays = {name: np.asarray(kernel) for name, kernel in model.items()}
  with tempfile.TemporaryDirectory() as folder:
    ours, deflated = (pathlib.Path(folder) / f"{name}.npz" for name in ("ours", "deflated"))
    optax_boost.permuted_params(state).save(ours)
    again = optax_boost.PermutedParams.load(ours, start).params
    for name, kernel in arrays.items():
      assert np.asarray(again[name]).tobytes() == kernel.tobytes(), "other weights were loaded"
    np.savez_compressed(deflated, **arrays)
    files = {"ours": ours.stat().st_size, "deflated": deflated.stat().st_size}
  weights = sum(kernel.size for kernel in arrays.values())
  values = sum(int(np.count_nonzero(kernel)) for kernel in arrays.values())
  values = 1 if setting.start in ("signs", "one value") else values
  bits = 0 if setting.start == "dense" else weights // 8
  return files | {"float32": 4 * weights, "plain": bits + 4 * values}


@functools.cache
def results(task):
  """Outcomes by the contender's name."""
  tuned = runs.tune(train, contenders(task), SEEDS)
  return {f"{method}, {start}": found for (start, method), found in tuned.items()}


def words(setting):
  """A setting in a table."""
  text = f"{setting.rate:g}"
  if setting.method == LAPERM:
    later = f", then {setting.later}" if setting.later != setting.every else ""
    text += f", every {setting.every}{later}"
  return text


def accuracy_table(task):
  """Test accuracies, and their distance from Adam's with dense weights."""
  reference = np.mean(results(task)[f"{ADAM}, dense"].values("test"))
  rows = [
    [
      name,
      tuned.spread("test"),
      f"{np.mean(tuned.values('test')) - reference:+.2f}" if tuned.setting.method != ADAM else "",
      words(tuned.setting),
      f"{max(value for _, value in tuned.tried):.2f}",
    ]
    for name, tuned in results(task).items()
  ]
  header = ["method, initial weights", "test accuracy, %", "minus Adam, dense"]
  return report.table([*header, "rate, steps between synchronizations", "validation"], rows)


SIZES = {
  "float32": "float32",
  "deflated": "float32, `np.savez_compressed`",
  "plain": "without a seed",
}


def models():
  """By CNN and initial weights, the bytes of the first seed's model."""
  return {
    (task, tuned.setting.start): tuned.values("bytes")[0]
    for task in CNNS
    for tuned in results(task).values()
    if tuned.setting.method == LAPERM
  }


def size_table():
  """Bytes on disk by task and initial weights."""
  rows = [
    [
      *key,
      f"{files['ours']:,}",
      f"{32 * files['ours'] / files['float32']:.1f}",
      f"{files['ours'] / files['float32']:.2f}",
      *(f"{files[name]:,}" for name in SIZES),
    ]
    for key, files in models().items()
  ]
  header = ["network", "initial weights", "seed and integers", "bits a weight", "of float32"]
  return report.table([*header, *SIZES.values()], rows)


def value_table():
  """Weights of one value, and the paper's figures."""
  rows = []
  for task in ONE_VALUE:
    ours, adam = (results(task)[name] for name in (f"{LAPERM}, one value", f"{ADAM}, dense"))
    widths = [784, *(shape[1] for shape in TASKS[task].kernels)]
    accuracies = [ours.spread("test"), f"{PAPER[task]:.2f}", adam.spread("test")]
    rows.append([task, "-".join(map(str, widths)), *accuracies, words(ours.setting)])
  header = ["network", "widths", "LaPerm, one value", "the paper", "Adam, dense", "setting"]
  return report.table(header, rows)


def picture():
  """Accuracy by initial weights, a panel for each CNN."""
  figure, panels = report.panels(CNNS, 4.8)
  for axes, task in zip(panels, CNNS, strict=True):
    found = results(task)
    dense = np.mean(found[f"{ADAM}, dense"].values("test"))
    axes.axhline(dense, color=report.GREY, linestyle="--", linewidth=1.5, label="Adam, dense")
    for method, colour, fmt in ((LAPERM, report.BLUE, "o"), (HELD, report.ORANGE, "s")):
      starts = [start for start in STARTS if f"{method}, {start}" in found]
      values = [found[f"{method}, {start}"].values("test") for start in starts]
      places = [STARTS.index(start) for start in starts]
      report.points(axes, places, values, method, fmt=fmt, color=colour)
    axes.set_xticks(range(len(STARTS)), STARTS)
    axes.set(xlim=(-0.4, len(STARTS) - 0.6))
    axes.set(xlabel="initial weights: share not zero, or random signs", ylabel="test accuracy, %")
    axes.legend(fontsize=9, loc="lower left")
  return figure


def test_reconnection_alone_trains():
  common.need("mnist", "cifar10")
  weights = [sum(np.prod(shape) for shape in TASKS[task].kernels) for task in CNNS]
  edges = [
    f"{task}: {name}"
    for task in TASKS
    for name, tuned in results(task).items()
    if tuned.setting.rate in (RATES[tuned.setting.method][0], RATES[tuned.setting.method][-1])
  ]
  page = report.words(
    "laperm",
    of_mnist=accuracy_table("MNIST"),
    of_cifar=accuracy_table("CIFAR-10"),
    edges="; ".join(edges) or "none",
    values=value_table(),
    sizes=size_table(),
    **{"mnist": weights[0], "cifar": weights[1], "a": TASKS["MNIST"], "b": TASKS["CIFAR-10"]},
  )
  report.write("laperm", *page, picture())
  for task, chance in {"MNIST": 50, "CIFAR-10": 15}.items():
    for name, tuned in results(task).items():
      assert np.mean(tuned.values("test")) > chance, (task, name)
  for task in ONE_VALUE:
    assert np.mean(results(task)[f"{LAPERM}, one value"].values("test")) > 30
  for key, files in models().items():
    assert files["ours"] < 0.5 * files["float32"], key
