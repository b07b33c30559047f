"""Fine-tunes a small transformer in four ways, each tuned, and shows what each costs and brings.

It learns characters from Python's language reference, then is fine-tuned to the docstrings of the
standard library. Each way has its learning rate chosen on validation text; then it is trained with
every seed. Prints a table and saves a picture of the loss against time.
"""

import argparse
import ast
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path
import pydoc_data.topics
import sysconfig
import time
from typing import Any
from typing import NamedTuple

import _transformer
import jax
from matplotlib.figure import Figure
import numpy as np
import optax
from tqdm import tqdm

import optax_boost

BATCH_SIZE = 8
RATES = (1.5e-3, 5e-3, 1.5e-2)
EVALUATIONS = 8


class Text(NamedTuple):
  """Characters as integers below 128.

  Attributes:
    base: the text that the model learns first.
    train: the text for fine-tuning.
    validation: held out, for learning rates.
    test: held out, for the table.
  """

  base: np.ndarray
  train: np.ndarray
  validation: np.ndarray
  test: np.ndarray


def read_corpus() -> Text:
  """Python's language reference and the docstrings of its standard library."""
  found = []
  for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
    for node in ast.walk(ast.parse(path.read_bytes())):
      if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        found.append(ast.get_docstring(node) or "")
  # In an order of their own, so that the parts are similar.
  found = [text for text in found if text]
  order = np.random.default_rng(0).permutation(len(found))
  own = _encode("\n\n".join(found[i] for i in order))
  ends = [len(own) * 8 // 10, len(own) * 9 // 10]
  return Text(_encode("\n".join(pydoc_data.topics.topics.values())), *np.split(own, ends))


def _encode(text: str) -> np.ndarray:
  return np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32)


def batches(text: np.ndarray, steps: int, seed: int) -> Iterator[np.ndarray]:
  """Random stretches of a text."""
  rng = np.random.default_rng(seed)
  columns = np.arange(_transformer.LENGTH + 1)
  for _ in range(steps):
    starts = rng.integers(0, len(text) - len(columns), BATCH_SIZE)
    yield text[starts[:, None] + columns]


class Way(NamedTuple):
  """A way to fine-tune.

  Attributes:
    make: from the directions of Adam, params, a batch and the number of steps to a transformation.
    after: what follows the learning rate, made from params and a batch.
  """

  make: Callable[..., optax.GradientTransformation]
  after: Callable[..., optax.GradientTransformation] = lambda params, batch: optax.identity()


def _groups(params: Any, batch: Any, number: int | None = None) -> optax_boost.LayerGroups:
  return optax_boost.layer_groups(_transformer.loss_fn, params, batch, num_groups=number)


def last_half(adam: Any, params: Any, batch: Any, steps: int) -> optax.GradientTransformation:
  """The first half of the layers never moves."""
  groups = _groups(params, batch, 2)
  return optax_boost.freeze_layers(adam, groups, optax_boost.fixed_freezing(2, 1))


def gradual(adam: Any, params: Any, batch: Any, steps: int) -> optax.GradientTransformation:
  """The last quarter trains first, and all of it from the middle on."""
  schedule = optax_boost.gradual_unfreezing(4, every=max(steps // 6, 1))
  return optax_boost.freeze_layers(adam, _groups(params, batch, 4), schedule)


def layerwise(params: Any, batch: Any) -> optax.GradientTransformation:
  """A group for each layer, with 0.75 of the rate of the one after it."""
  return optax_boost.layerwise_decay(_groups(params, batch), 0.75)


WAYS = {
  "full": Way(lambda adam, *_: adam),
  "last half": Way(last_half),
  "gradual unfreezing": Way(gradual),
  "layer-wise decay": Way(lambda adam, *_: adam, layerwise),
}


class Run(NamedTuple):
  """A training.

  Attributes:
    seconds: of processor time since its start, at each evaluation, without compiling and
      evaluating; other work on the machine counts little.
    losses: on held-out text, at these.
  """

  seconds: list[float]
  losses: list[float]


def evaluate(params: Any, text: np.ndarray) -> float:
  """The loss on held-out text, in nats per character."""
  return float(np.mean([_loss(params, batch) for batch in batches(text, 8, seed=1)]))


_loss = jax.jit(_transformer.loss_fn)


def train(
  start: Any,
  tx: optax.GradientTransformation,
  text: np.ndarray,
  held_out: np.ndarray,
  steps: int,
  seed: int,
) -> tuple[Any, Run]:
  """Trains from given params and evaluates along the way.

  Args:
    start: the params.
    tx: the transformation.
    text: to train on.
    held_out: to evaluate on.
    steps: how many.
    seed: of the batches.
  """
  step = optax_boost.make_train_step(_transformer.loss_fn, tx)
  state, spent = step.init(start), 0.0
  run, compiled = Run([], []), set[int]()
  points = set(np.linspace(steps // EVALUATIONS, steps, EVALUATIONS, dtype=int).tolist())
  for i, batch in enumerate(batches(text, steps, seed), 1):
    begin = time.process_time()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    depth = int(metrics.get("frozen_groups", 0))
    if depth in compiled:  # the first step of a depth compiles its program
      spent += time.process_time() - begin
    compiled.add(depth)
    if i in points:
      run.seconds.append(spent)
      run.losses.append(evaluate(state.params, held_out))
  return state.params, run


def pretrain(text: np.ndarray, steps: int) -> Any:
  """Learns the base text."""
  start = _transformer.init(jax.random.key(0))
  rate = optax.warmup_cosine_decay_schedule(0.0, 5e-3, steps // 20, steps)
  return train(start, optax.adam(rate), text, text, steps, seed=0)[0]


def fine_tune(
  name: str, rate: float, start: Any, text: Text, held_out: np.ndarray, steps: int, seed: int
) -> Run:
  """Fine-tunes in one way, with a rate that falls to zero."""
  batch = next(batches(text.train, 1, 0))
  inner = WAYS[name].make(optax.scale_by_adam(), start, batch, steps)
  schedule = optax.cosine_decay_schedule(rate, steps)
  after = WAYS[name].after(start, batch)
  tx = optax.chain(inner, optax.scale_by_learning_rate(schedule), after)
  return train(start, tx, text.train, held_out, steps, seed)[1]


def table(runs: dict[str, list[Run]], rates: dict[str, float], base: float) -> str:
  """The table in Markdown."""
  full = np.mean([run.seconds[-1] for run in runs["full"]])
  lines = [
    f"Before fine-tuning: {base:.3f} nats per character.\n",
    "| | loss | processor time | rate |",
    "|---|---|---|---|",
  ]
  for name, own in runs.items():
    losses = [run.losses[-1] for run in own]
    seconds = np.mean([run.seconds[-1] for run in own])
    lines.append(
      f"| {name} | {np.mean(losses):.3f} ± {np.std(losses):.3f} | {seconds / full:.2f} of"
      f" {full:.1f} s | {rates[name]:g} |"
    )
  return "\n".join(lines)


def draw(runs: dict[str, list[Run]], path: Path) -> None:
  """Saves the loss against time."""
  figure = Figure(figsize=(4.8, 3.6), layout="constrained")
  axes = figure.subplots()
  for name, own in runs.items():
    seconds = np.mean([run.seconds for run in own], 0)
    axes.plot(seconds, np.mean([run.losses for run in own], 0), marker=".", label=name)
  axes.set(xlabel="seconds of processor time", ylabel="loss, nats per character")
  axes.legend(frameon=False)
  axes.spines[["top", "right"]].set_visible(False)
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=120)


def main() -> None:
  """Trains with every way and seed, prints the table and saves the picture."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--steps", type=int, default=200, help="of fine-tuning")
  parser.add_argument("--base-steps", type=int, default=1000, help="of learning the base text")
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--out", type=Path, default=Path("out/finetune.png"))
  options = parser.parse_args()
  if options.steps < EVALUATIONS or options.base_steps < EVALUATIONS or options.seeds < 1:
    parser.error(f"--steps and --base-steps must be at least {EVALUATIONS}, --seeds at least 1")
  text = read_corpus()
  print("Learning the language reference ...")
  start = pretrain(text.base, options.base_steps)
  rates, runs = {}, {}
  with tqdm(total=len(WAYS) * (len(RATES) + options.seeds), unit="run") as bar:
    for name in WAYS:
      bar.set_description(name)
      found = {}
      for rate in RATES:
        run = fine_tune(name, rate, start, text, text.validation, options.steps, seed=1000)
        found[rate] = run.losses[-1]
        bar.update()
      rates[name] = min(found, key=lambda rate: found[rate] if np.isfinite(found[rate]) else np.inf)
      runs[name] = []
      for seed in range(options.seeds):
        run = fine_tune(name, rates[name], start, text, text.test, options.steps, seed)
        runs[name].append(run)
        bar.update()
  print(table(runs, rates, evaluate(start, text.test)))
  draw(runs, options.out)
  print(f"The picture is {options.out}.")


if __name__ == "__main__":
  main()
