"""LaPerm's own claims: sparse weights and weights of one magnitude, trained by reconnection.

``make evidence PARTS=laperm`` trains CNNs on MNIST and CIFAR-10, and the paper's two networks whose
weights are one value or zero. Weights only ever change places in the weight vector of an output.
Each model is saved as a seed and integers, loaded again, and compared with files of float32.
"""

import functools
import pathlib
import tempfile
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optax_boost
from tests.evidence import common
from tests.evidence import report
from tests.evidence import runs

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


def grid(task: str, start: str, method: str) -> list[Setting]:
  """The settings among which a contender's is chosen."""
  periods = PERIODS if method == LAPERM else ((0, 0),)
  return [
    Setting(task, start, method, rate, *period) for rate in RATES[method] for period in periods
  ]


def contenders(task: str) -> dict[tuple[str, str], list[Setting]]:
  """By initial weights and method, the settings."""
  if task in ONE_VALUE:
    pairs = [("dense", ADAM), ("one value", LAPERM)]
  else:
    pairs = [("dense", ADAM), ("10 %", HELD), *((start, LAPERM) for start in STARTS)]
  return {(start, method): grid(task, start, method) for start, method in pairs}


@functools.cache
def data(task: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """The parts of a task's data; pixels from 0 to 1 for weights of one value, as in the paper."""
  parts = common.images(TASKS[task].data, TASKS[task].halved)
  if task in ONE_VALUE:
    low = parts["train"][0].min()
    high = parts["train"][0].max()
    parts = {part: ((x - low) / (high - low), y) for part, (x, y) in parts.items()}
  return parts


def initial(task: str, start: str, seed: int) -> dict[str, jax.Array]:
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


def logits_of(task: str, params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
  """The network's output, without biases and normalization."""
  *hidden, last = params.values()
  for i, kernel in enumerate(hidden):
    if kernel.ndim == 4:
      x = jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
      )
      if i in TASKS[task].pooled:
        n, height, width, channels = x.shape
        x = x.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))
    else:
      x = x.reshape(len(x), -1) @ kernel
    x = jax.nn.relu(x)
  return x.reshape(len(x), -1) @ last


@functools.cache
def programs(task: str, reconnects: bool) -> tuple[Any, Any, Any]:
  """The optimizer's `init`, the step and the prediction, compiled once for all settings."""

  def transformation(rate: Any, every: Any) -> optax.GradientTransformation:
    adam = optax.adam(rate)
    return optax_boost.laperm(adam, lambda count: every) if reconnects else adam

  def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    logits = logits_of(task, params, x)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params: Any, state: Any, held: Any, x: Any, y: Any, rate: Any, every: Any) -> Any:
    gradients = jax.grad(loss_of)(params, x, y)
    if reconnects:
      tx = transformation(rate, every)
      return optax_boost.apply_gradients(tx, gradients, state, params)
    updates, state = transformation(rate, every).update(gradients, state, params)
    updates = jax.tree.map(lambda u, zero: jnp.where(zero, 0, u), updates, held)
    return optax.apply_updates(params, updates), state

  predict = jax.jit(lambda params, x: jnp.argmax(logits_of(task, params, x), -1))
  return transformation(0.0, 1).init, step, predict


def train(setting: Setting, seed: int) -> dict[str, Any]:
  """Accuracy on validation images, of reported seeds on test images, and the sizes of files."""
  task = TASKS[setting.task]
  init, step, predict = programs(setting.task, setting.method == LAPERM)
  start = initial(setting.task, setting.start, seed)
  held = jax.tree.map(lambda kernel: (kernel == 0) & (setting.method == HELD), start)
  params = jax.tree.map(jnp.array, start)
  state = init(params)
  x, y = data(setting.task)["train"]
  rng, order = np.random.default_rng(seed), np.zeros(0, int)
  for count in range(task.steps):
    if len(order) < task.batch:
      order = rng.permutation(len(y))
    rows, order = order[: task.batch], order[task.batch :]
    rate = np.float32(setting.rate * (1 + np.cos(np.pi * count / task.steps)) / 2)
    every = np.int32(setting.every if count < task.steps // 2 else setting.later)
    params, state = step(params, state, held, x[rows], y[rows], rate, every)
  model = optax_boost.permuted_params(state).params if setting.method == LAPERM else params
  part = "validation" if seed == runs.TUNING_SEED else "test"
  x, y = data(setting.task)[part]
  blocks = range(0, len(y), 1000)
  right = [np.asarray(predict(model, x[i : i + 1000]) == y[i : i + 1000]) for i in blocks]
  result: dict[str, Any] = {part: 100 * float(np.mean(np.concatenate(right)))}
  if setting.method == LAPERM and part == "test":
    moved = [np.mean(np.asarray(model[name] != start[name])) for name in model]
    result |= {"moved": float(np.mean(moved)), "bytes": sizes(setting, start, model, state)}
  return result


def sizes(setting: Setting, start: Any, model: Any, state: Any) -> dict[str, int]:
  """Bytes on disk of a model as a seed and integers, loaded again to the last bit, and others."""
  for was, now in zip(start.values(), model.values(), strict=True):
    vectors = (np.sort(np.reshape(kernel, (-1, kernel.shape[-1])), 0) for kernel in (was, now))
    assert np.array_equal(*vectors), "no permutation of the initial weights"
  arrays = {name: np.asarray(kernel) for name, kernel in model.items()}
  indices = jax.tree.map(np.asarray, optax_boost.permuted_params(state).permutation)
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder)
    ours = path / "ours.npz"
    optax_boost.permuted_params(state).save(ours)
    again = optax_boost.PermutedParams.load(ours, start).params
    for name, kernel in arrays.items():
      assert np.asarray(again[name]).tobytes() == kernel.tobytes(), "other weights were loaded"
    np.savez(path / "float32.npz", **arrays)
    np.savez_compressed(path / "deflated.npz", **arrays)
    np.savez(path / "indices.npz", **indices)
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(path / "checkpoint", model)
    checkpoint = sum(f.stat().st_size for f in (path / "checkpoint").rglob("*") if f.is_file())
    files = {
      name: (path / f"{name}.npz").stat().st_size
      for name in ("ours", "float32", "deflated", "indices")
    }
  weights = sum(kernel.size for kernel in arrays.values())
  nonzero = sum(int(np.count_nonzero(kernel)) for kernel in arrays.values())
  plain = 4 * weights if setting.start == "dense" else weights // 8 + 4 * nonzero
  if setting.start in ("signs", "one value"):
    plain = weights // 8 + 4
  return files | {"checkpoint": checkpoint, "plain": plain, "weights": weights}


@functools.cache
def results(task: str) -> dict[str, dict[str, Any]]:
  """Settings and outcomes by contender, JSON-able."""
  tuned = runs.tune(train, contenders(task), SEEDS)
  return {
    f"{method}, {start}": {
      "start": start,
      "method": method,
      "setting": found.setting._asdict(),
      "tried": [[setting._asdict(), value] for setting, value in found.tried],
      "test": [result["test"] for result in found.results],
      "moved": [result.get("moved") for result in found.results],
      "bytes": found.results[0].get("bytes"),
    }
    for (start, method), found in tuned.items()
  }


def needed(task: str) -> dict[str, dict[str, Any]]:
  """The outcomes of a task, or a skipped test."""
  common.need(TASKS[task].data)
  return results(task)


def mean_of(task: str, name: str) -> float:
  return float(np.mean(needed(task)[name]["test"]))


@pytest.mark.parametrize("task", CNNS)
def test_every_start_trains_above_chance(task):
  for name, found in needed(task).items():
    assert np.mean(found["test"]) > {"MNIST": 50, "CIFAR-10": 15}[task], name


@pytest.mark.parametrize("task", ONE_VALUE)
def test_one_value_and_zeros_classify_far_better_than_chance(task):
  assert mean_of(task, f"{LAPERM}, one value") > 30


@pytest.mark.parametrize("task", CNNS)
def test_a_model_of_integers_is_smaller_than_its_floats(task):
  for name, found in needed(task).items():
    if found["method"] == LAPERM:
      assert found["bytes"]["ours"] < 0.5 * found["bytes"]["float32"], name


def words(setting: dict[str, Any]) -> str:
  """A setting in a table."""
  text = f"{setting['rate']:g}"
  if setting["method"] == LAPERM:
    every, later = setting["every"], setting["later"]
    text += f", every {every}" + (f", then {later}" if later != every else "")
  return text


def accuracy_table(task: str) -> str:
  """Test accuracies beside Adam's with dense weights."""
  found = results(task)
  reference = np.mean(found[f"{ADAM}, dense"]["test"])
  rows = []
  for entry in found.values():
    difference = np.mean(entry["test"]) - reference
    is_reference = entry["method"] == ADAM
    rows.append(
      [
        f"{entry['method']}, {entry['start']}",
        report.spread(entry["test"]),
        "" if is_reference else f"{difference:+.2f}",
        words(entry["setting"]),
        f"{max(value for _, value in entry['tried']):.2f}",
      ]
    )
  header = [
    "method, initial weights",
    "test accuracy, %",
    "minus Adam, dense",
    "rate, steps between synchronizations",
    "validation",
  ]
  return report.table(header, rows)


def size_table() -> str:
  """Bytes on disk by task and initial weights."""
  rows = []
  for task in CNNS:
    for entry in results(task).values():
      files = entry["bytes"]
      if files is not None:
        rows.append(
          [
            task,
            entry["start"],
            f"{files['ours']:,}",
            f"{8 * files['ours'] / files['weights']:.1f}",
            f"{files['ours'] / files['float32']:.2f}",
            *(f"{files[key]:,}" for key in ("float32", "deflated", "checkpoint")),
            f"{files['plain']:,}",
            f"{files['indices']:,}",
          ]
        )
  header = [
    "network",
    "initial weights",
    "seed and integers",
    "bits a weight",
    "of float32",
    "float32, `np.savez`",
    "float32, `np.savez_compressed`",
    "float32, Orbax",
    "without a seed",
    "int32 of `permutation`",
  ]
  return report.table(header, rows)


def value_table() -> str:
  """Weights of one value, beside the paper's figures."""
  rows = [
    [
      task,
      "-".join(map(str, [TASKS[task].kernels[0][0], *(k[1] for k in TASKS[task].kernels)])),
      report.spread(results(task)[f"{LAPERM}, one value"]["test"]),
      f"{PAPER[task]:.2f}",
      report.spread(results(task)[f"{ADAM}, dense"]["test"]),
      words(results(task)[f"{LAPERM}, one value"]["setting"]),
    ]
    for task in ONE_VALUE
  ]
  header = ["network", "widths", "LaPerm, one value", "the paper", "Adam, dense", "setting"]
  return report.table(header, rows)


# Okabe and Ito's.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#5A5A5A"


def picture() -> Figure:
  """Accuracy by initial weights, a panel for each CNN."""
  figure = Figure(figsize=(9.6, 3.8), dpi=90, layout="constrained")
  for axes, task in zip(figure.subplots(1, len(CNNS)), CNNS, strict=True):
    found = results(task)
    reference = found[f"{ADAM}, dense"]["test"]
    axes.axhline(np.mean(reference), color=GREY, linestyle="--", linewidth=1.5, label="Adam, dense")
    for method, colour, marker in ((LAPERM, BLUE, "o"), (HELD, ORANGE, "s")):
      starts = [start for start in STARTS if f"{method}, {start}" in found]
      values = [found[f"{method}, {start}"]["test"] for start in starts]
      places = [STARTS.index(start) for start in starts]
      axes.errorbar(
        places,
        np.mean(values, 1),
        np.std(values, 1, ddof=1),
        fmt=marker,
        color=colour,
        capsize=3,
        label=method,
      )
    axes.set_xticks(range(len(STARTS)), STARTS)
    axes.set(xlim=(-0.4, len(STARTS) - 0.6), title=task)
    axes.set(xlabel="initial weights: share not zero, or random signs", ylabel="test accuracy, %")
    axes.grid(axis="y", color="#E5E5E5")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, loc="lower left")
  return figure


ABOUT = (
  "Networks of rectified layers without biases and normalization, all of whose weights LaPerm only"
  " moves within the weight vectors of the outputs: a Conv-2 on MNIST averaged to 14 x 14"
  " ({mnist:,} weights, {a.steps:,} batches of {a.batch}) and a Conv-4 on 24,000 images of"
  " CIFAR-10 averaged to 16 x 16 ({cifar:,} weights, {b.steps:,} batches of {b.batch}). Initial"
  " weights: He's uniform distribution; the same with zeros drawn (the first layer keeps 80 %, as"
  " in the authors' code), the others larger so that variances stay; or random signs times one"
  " number for the whole model. *Adam, zeros held* trains the values of the 10 % and no"
  " connections. Adam's rate, inside LaPerm, too, falls as a cosine; it and the steps between"
  " synchronizations (5; 20; 20 in the first half and 100 in the second) were chosen for each row"
  " on validation images, with another seed; mean and standard deviation of three seeds. The"
  " paper's networks are larger, have BatchNorm and biases that train freely, and train for a"
  " hundred times as many steps."
)


def edges() -> str:
  """The contenders whose best rate is at an end of the grid."""
  found = [
    f"{task}: {name}"
    for task in TASKS
    for name, entry in results(task).items()
    if entry["setting"]["rate"] in (RATES[entry["method"]][0], RATES[entry["method"]][-1])
  ]
  return f"Rates at an end of their grid: {'; '.join(found) or 'none'}.\n"


def test_the_results_are_written():
  for task in TASKS:
    needed(task)
  weights = [sum(np.prod(shape) for shape in TASKS[task].kernels) for task in CNNS]
  about = ABOUT.format(mnist=weights[0], cifar=weights[1], a=TASKS["MNIST"], b=TASKS["CIFAR-10"])
  body = "\n".join(
    [
      *(f"\n## {task}\n\n{accuracy_table(task)}" for task in CNNS),
      edges(),
      "\n## Weights of one value or zero\n",
      "The paper's F1 and F2 (section 5.5): dense networks without biases, on MNIST, weights 0.08"
      " or 0 (4 of 7 not zero), and 0.03 or 0 (1 of 15, 7 and 3, by layer); 3,000 batches of 128."
      " The paper trains F1 for 10 epochs and F2 for 25, synchronizes every 250 steps, which was"
      " not among the periods tried, and reports the best step on test images; this table has the"
      " last.\n",
      value_table(),
      "\n## A model as a seed and integers\n",
      "Bytes on disk of the models of seed 0, each loaded again and equal to the last bit."
      " *Seed and integers*: `PermutedParams.save`. *Without a seed*: of sparse weights, a bit"
      " each that says whether it is zero, and the others in float32; of random signs, a bit each"
      " and one number (counted, no file). Orbax compresses.\n",
      size_table(),
    ]
  )
  report.write(
    "laperm", "LaPerm: reconnection alone", about, body, {t: results(t) for t in TASKS}, picture()
  )
