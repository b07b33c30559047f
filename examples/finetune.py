"""Fine-tunes a small transformer in four ways, and shows what each costs and brings.

It learns characters from Python's language reference, then is fine-tuned to the docstrings of the
standard library with every way and seed. Prints a table and saves a picture of the loss against
time. `--tune` first chooses each way's learning rate on validation text; else all have one rate.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
import sys
from typing import Any, NamedTuple

import _command
import _memory

NAME, OUT = "finetune", "out/finetune.png"

try:  # JAX takes seconds to import: long enough for a Ctrl-C.
  _memory.keep_freed_memory()
  import _texts
  import _transformer
  import _transformer_training as training
  import jax
  from matplotlib.figure import Figure
  import numpy as np
  import optax
  from tqdm import tqdm

  import optax_boost
except KeyboardInterrupt:
  sys.exit(_command.interrupted(NAME))

BATCH_SIZE = 8
STEPS, BASE_STEPS, SEEDS = 200, 1000, 3
# Among these `--tune` chooses each way's rate; without it all have the middle one.
RATES = (1.5e-3, 5e-3, 1.5e-2)
RATE = RATES[1]
HELD_OUT, EVALUATIONS = 64, 8
# Of the ways in the picture, as in the demo's: Okabe and Ito's, and a grey for all layers.
COLOURS = ("#5A5A5A", "#0072B2", "#009E73", "#D55E00")


def batches(text: np.ndarray, steps: int, seed: int) -> Iterator[np.ndarray]:
  """Random windows of a text, for each step."""
  rng = np.random.default_rng(seed)
  for _ in range(steps):
    yield _texts.windows(text, BATCH_SIZE, _transformer.LENGTH, rng)


def held_out(text: np.ndarray) -> np.ndarray:
  """The windows on which losses are measured."""
  return _texts.windows(text, HELD_OUT, _transformer.LENGTH, np.random.default_rng(1))


def _groups(params: Any, number: int | None = None) -> optax_boost.LayerGroups:
  return optax_boost.layer_groups(params, _transformer.NAMES, num_groups=number)


def full(adam: Any, params: Any, steps: int) -> optax.GradientTransformation:
  """All layers train."""
  return adam


def last_half(adam: Any, params: Any, steps: int) -> optax.GradientTransformation:
  """The first half of the layers never moves."""
  groups = _groups(params, 2)
  return optax_boost.freeze_layers(adam, groups, optax_boost.fixed_freezing(2, 1))


def gradual(adam: Any, params: Any, steps: int) -> optax.GradientTransformation:
  """The last quarter trains first, and all of it from the middle on."""
  schedule = optax_boost.gradual_unfreezing(4, every=max(steps // 6, 1))
  return optax_boost.freeze_layers(adam, _groups(params, 4), schedule)


def layerwise(adam: Any, params: Any, steps: int) -> optax.GradientTransformation:
  """A group for each layer, with 0.75 of the rate of the one after it."""
  return optax_boost.layerwise_decay(adam, _groups(params), 0.75)


# From Adam, params and the number of steps to the transformation of a way to fine-tune.
WAYS: dict[str, Callable[..., optax.GradientTransformation]] = {
  "full": full,
  "last half": last_half,
  "gradual unfreezing": gradual,
  "layer-wise decay": layerwise,
}


class Plan(NamedTuple):
  """The arguments of a run, all checked."""

  steps: int
  base_steps: int
  seeds: int
  tune: bool
  out: Path


def pretrain(text: np.ndarray, steps: int) -> Any:
  """Learns the base text."""
  start = _transformer.init(jax.random.key(0))
  rate = optax.warmup_cosine_decay_schedule(0.0, RATE, steps // 20, steps)
  step = optax_boost.make_train_step(_transformer.loss_fn, optax.adam(rate))
  feed = tqdm(batches(text, steps, seed=0), "language reference", steps, unit="step")
  return training.train(step, start, feed, held_out(text), points=[steps])[0]


def make_step(name: str, rate: float, start: Any, steps: int) -> Any:
  """The train step of a way, with a rate that falls to zero."""
  adam = optax.adam(optax.cosine_decay_schedule(rate, steps))
  return optax_boost.make_train_step(_transformer.loss_fn, WAYS[name](adam, start, steps))


def fine_tune(
  step: Any, start: Any, text: np.ndarray, windows: np.ndarray, steps: int, seed: int
) -> training.Run:
  """Fine-tunes with a train step of :func:`make_step`; the loss is measured on windows."""
  points = training.evaluation_points(steps, EVALUATIONS)
  return training.train(step, start, batches(text, steps, seed), windows, points)[1]


def choose_rate(name: str, start: Any, text: _texts.Text, steps: int, bar: tqdm) -> float:
  """The rate of the least loss on validation text."""
  found = {}
  for rate in RATES:
    step = make_step(name, rate, start, steps)
    run = fine_tune(step, start, text.train, held_out(text.validation), steps, seed=1000)
    found[rate] = run.losses[-1] if np.isfinite(run.losses[-1]) else np.inf
    bar.update()
  return min(found, key=lambda rate: found[rate])


def table(runs: dict[str, list[training.Run]], rates: dict[str, float], base: float) -> str:
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


def draw(runs: dict[str, list[training.Run]]) -> Figure:
  """The loss against time."""
  figure = Figure(figsize=(6, 3.6), dpi=150, layout="constrained")
  axes = figure.subplots()
  for (name, own), colour in zip(runs.items(), COLOURS, strict=True):
    seconds = np.mean([run.seconds for run in own], 0)
    losses = np.mean([run.losses for run in own], 0)
    axes.plot(seconds, losses, marker=".", color=colour, linewidth=2, label=name)
  axes.set(xlabel="seconds of processor time", ylabel="loss, nats per character", axisbelow=True)
  axes.grid(color="#E5E5E5")
  axes.legend(frameon=False)
  axes.spines[["top", "right"]].set_visible(False)
  return figure


def prepare(argv: Sequence[str] | None) -> Plan:
  """Reads the command line and checks all of it.

  Args:
    argv: the arguments; None: the process's.

  Raises:
    ValueError: an argument is wrong.
    OSError: the picture can't be written.
  """
  parser = _command.parser(NAME, __doc__)
  add = parser.add_argument
  add("--steps", type=int, default=STEPS, help="of fine-tuning")
  add("--base-steps", type=int, default=BASE_STEPS, help="of learning the base text")
  add("--seeds", type=int, default=SEEDS, help="how many")
  add("--tune", action="store_true", help="choose each way's learning rate first")
  least = {"steps": EVALUATIONS, "base_steps": EVALUATIONS, "seeds": 1}
  options = _command.read(parser, argv, OUT, **least)
  return Plan(options.steps, options.base_steps, options.seeds, options.tune, options.out)


def work(plan: Plan) -> tuple[Figure, Path]:
  """Trains with every way and seed and prints the table; returns the picture and its path."""
  rates = dict.fromkeys(WAYS, RATE)
  chosen, minutes = "at the rate of each that is best", "five"
  if not plan.tune:
    chosen, minutes = f"at a rate of {RATE:g} for all", "three"
  print(
    f"A small transformer learns the language reference of {_texts.PYTHON}, then is fine-tuned to"
    f"\nthe docstrings of its library in {len(WAYS)} ways, {chosen}. About"
    f" {minutes} minutes\non two CPU cores; nothing is downloaded.",
    flush=True,
  )
  base = _texts.encode(_texts.language_reference())
  text = _texts.split("\n\n".join(_texts.docstrings()))
  start = pretrain(base, plan.base_steps)
  runs: dict[str, list[training.Run]] = {}
  number = len(WAYS) * (plan.seeds + plan.tune * len(RATES))
  with tqdm(total=number, unit="run") as bar:
    for name in WAYS:
      bar.set_description(name)
      if plan.tune:
        rates[name] = choose_rate(name, start, text, plan.steps, bar)
      step = make_step(name, rates[name], start, plan.steps)
      runs[name] = []
      for seed in range(plan.seeds):
        run = fine_tune(step, start, text.train, held_out(text.test), plan.steps, seed)
        runs[name].append(run)
        bar.update()
  print(f"\n{table(runs, rates, float(training.evaluate(start, held_out(text.test))))}")
  return draw(runs), plan.out


def main(argv: Sequence[str] | None = None) -> int:
  """Compares the ways; returns the exit status.

  Args:
    argv: the arguments; None: the process's.
  """
  return _command.run(NAME, prepare, work, argv)


if __name__ == "__main__":
  _command.end(main())
