"""The races that the method cards show: `python -m benchmarks.races`.

Each trains on scikit-learn's digits. The tables go to ``results/races.md``, the pictures, which the
docs include, to ``docs/figures``.
"""

import argparse
from collections.abc import Callable, Mapping
import dataclasses
import functools
import pathlib
import sys
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
import optax
import scipy.optimize

from benchmarks import _harness, plot
import optax_boost
from optax_boost import RaceResult
import optax_boost.nnx

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from _data import digits  # noqa: E402
from _methods import METHODS, rate  # noqa: E402
import _model  # noqa: E402
from _model import CNN  # noqa: E402
import _training  # noqa: E402
import half_precision as half  # noqa: E402

_RATES = (0.02, 0.05, 0.1, 0.2, 0.5)
_BFLOAT = jnp.dtype("bfloat16")


def large_batches() -> RaceResult:
  """LARS and centralization against SGD: make demo-large-batch's network, batches of 512."""
  steps = _training.STEPS
  methods = {name: method.make(steps, **method.chosen) for name, method in METHODS.items()}
  return _training.race(digits(), methods, batch_size=512, epochs=steps // 2, seeds=range(5))


def freezing() -> RaceResult:
  """Freezing schedules against none: make demo-large-batch's network, batches of 64, 10 epochs."""
  data, epochs, batch_size = digits(), 10, 64
  steps = epochs * _training.steps_per_epoch(data, batch_size)
  # The layers in the order of the forward pass.
  groups = ["conv_1|norm", "conv_2", "conv_3", "conv_4", "conv_5", "conv_6", "head"]
  number = len(groups)
  rate = optax.cosine_decay_schedule(0.05, steps)
  schedules = {
    "interval, 30 %": optax_boost.interval_freezing(number, 0.3),
    "continuous, 50 %": optax_boost.continuous_freezing(number, 0.5),
  }
  methods = {"no freezing": optax.sgd(rate, 0.9)}
  methods |= {
    name: optax_boost.freeze_layers(optax.sgd(rate, 0.9), groups, schedule)
    for name, schedule in schedules.items()
  }
  methods["progressive from 50 %"] = optax_boost.freeze_layers(
    # The schedule anneals each group's rate itself.
    optax.sgd(0.05, 0.9),
    groups,
    optax_boost.progressive_freezing(number, steps, first=0.5),
  )
  return _training.race(data, methods, batch_size=batch_size, epochs=epochs, seeds=range(3))


def convex() -> RaceResult:
  """SVRG against SGD on logistic regression, batches of 32, at a constant learning rate."""
  part = digits().train
  x = part.images.reshape(len(part.labels), -1)
  x, y = np.concatenate([x, np.ones_like(x[:, :1])], axis=1), part.labels

  def loss_fn(w, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ w, batch["y"])
    return jnp.mean(losses) + 0.005 * jnp.sum(w * w)

  data = {"x": x, "y": y}
  with jax.enable_x64(True):
    wide = {"x": jnp.asarray(x, jnp.float64), "y": y}
    objective = jax.jit(jax.value_and_grad(lambda w: loss_fn(w.reshape(-1, 10), wide)))
    start = np.zeros(x.shape[1] * 10)
    found = scipy.optimize.minimize(
      lambda w: [np.asarray(v) for v in objective(w)], start, jac=True, tol=1e-14,
      options={"maxiter": 2000},
    )  # fmt: skip
  optimum, above = float(found.fun), "loss above the optimum"
  batches = jax.tree.map(lambda a: jnp.asarray(a).reshape(32, 32, *a.shape[1:]), data)
  full = functools.partial(optax_boost.full_gradient, stacked=True, batches=batches)
  return optax_boost.race(
    loss_fn,
    lambda key: 0.1 * jax.random.normal(key, (x.shape[1], 10)),
    data,
    {
      "sgd": optax.sgd(0.05),
      "svrg": optax.chain(optax_boost.svrg(refresh_every=64), optax.sgd(0.05)),
    },
    steps=40_000,
    batch_size=32,
    full_grad_fn=full,
    # In float32 the objective itself is known to 1e-7.
    evaluate=jax.jit(lambda w: {above: jnp.maximum(loss_fn(w, data) - optimum, 1e-8)}),
  )


class Normalized(CNN):
  """The demo's network with a BatchNorm after every convolution."""

  def __init__(self, channels: int, classes: int, *, rngs: nnx.Rngs):
    super().__init__(channels, classes, rngs=rngs)
    widths = (32, 32, 32, 64, 64)
    self.norms = nnx.List([nnx.BatchNorm(width, momentum=0.5, rngs=rngs) for width in widths])

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps images to logits."""
    x = nnx.relu(self.norm(self.conv_1(x)))
    convs = (self.conv_2, self.conv_3, self.conv_4, self.conv_5, self.conv_6)
    for conv, norm in zip(convs, self.norms, strict=True):
      x = nnx.relu(norm(conv(x)))
    return self.head(self.dropout(jnp.mean(x, axis=(1, 2))))


def _on_digits(
  network: Callable[..., Any],
  loss_fn: Callable[..., Any],
  transformations: Mapping[str, optax.GradientTransformation],
  epochs: int,
  batch_size: int = 64,
  points: int = 40,
) -> RaceResult:
  return _training.race(
    digits(),
    transformations,
    batch_size=batch_size,
    epochs=epochs,
    seeds=range(3),
    points=points,
    network=network,
    loss_fn=loss_fn,
  )


def _together(results: Mapping[str, RaceResult]) -> RaceResult:
  """Races of one method each, on models of their own, as one.

  Their times are left out: the methods took no turns, so other work may have slowed one of them.
  """
  first = next(iter(results.values()))
  curves = {name: result.curves[name] for name, result in results.items()}
  spent = {name: result.spent[name] for name, result in results.items()}
  for totals in spent.values():
    totals["seconds"] = np.full_like(totals["seconds"], np.nan)
  return dataclasses.replace(first, curves=curves, spent=spent)


def centralization(network: type[CNN]) -> RaceResult:
  """SGD with and without centralization at each of some learning rates, batches of 64."""
  steps = 5 * _training.steps_per_epoch(digits(), 64)
  sgd = {peak: optax.sgd(rate(steps, peak), 0.9) for peak in _RATES}
  methods = {f"sgd, {peak:g}": tx for peak, tx in sgd.items()}
  methods |= {
    f"centralize, {peak:g}": optax.chain(optax_boost.centralize(), tx) for peak, tx in sgd.items()
  }
  return _on_digits(network, _model.loss_fn, methods, epochs=5, points=5)


def normalized() -> RaceResult:
  """LARS against SGD by learning rate: a BatchNorm after every convolution, batches of 512."""
  steps = _training.STEPS
  methods = {f"sgd, {peak:g}": optax.sgd(rate(steps, peak), 0.9) for peak in _RATES}
  methods |= {
    f"lars, {peak:g}": optax_boost.lars(rate(steps, peak), trust_coefficient=0.01)
    for peak in (0.2, 0.5, 1.0, 2.0, 5.0)
  }
  return _on_digits(
    Normalized, _model.loss_fn, methods, epochs=steps // 2, batch_size=512, points=1
  )


def lars_start() -> RaceResult:
  """LARS as its card starts against tuned SGD: make demo-large-batch's network, batches of 512."""
  steps = _training.STEPS
  methods = {"sgd": METHODS["sgd"].make(steps, **METHODS["sgd"].chosen)}
  for coefficient, peak in ((0.001, 0.5), (0.01, 0.2), (0.01, 0.5), (0.01, 1.0)):
    methods[f"lars, coefficient {coefficient:g}, {peak:g}"] = optax_boost.lars(
      rate(steps, peak), trust_coefficient=coefficient, weight_decay=1e-4
    )
  return _training.race(
    digits(), methods, batch_size=512, epochs=steps // 2, seeds=range(5), points=1
  )


def centralization_picture(results: Mapping[str, RaceResult]) -> Figure:
  """Test accuracy at the end, by learning rate; a panel for each network."""
  figure = Figure(figsize=(11, 3.6), dpi=100, layout="constrained")
  panels = figure.subplots(1, len(results), sharey=True)
  for axes, (heading, result) in zip(panels, results.items(), strict=True):
    for method, colour in (("sgd", plot.OTHERS), ("centralize", plot.OURS)):
      ends = np.array([result.values(f"{method}, {r:g}", _training.ACCURACY) for r in _RATES])
      mean, spread = ends.mean(1), ends.std(1)
      axes.fill_between(_RATES, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)
      axes.plot(_RATES, mean, marker="o", color=colour, label=method, linewidth=2)
    # Where training fails, lines leave the panel.
    axes.set(xscale="log", xlabel="peak learning rate", xticks=_RATES, ylim=(93, 99.5))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_title(heading.partition(": ")[2], loc="left", fontsize=11)
    plot.clean(axes)
  panels[0].set_ylabel("test accuracy, %")
  panels[0].legend(frameon=False, loc="lower center")
  return figure


def _half(dtype: Any) -> Callable[..., half.CNN]:
  return lambda channels, classes, *, rngs: half.CNN(dtype, rngs=rngs)


def half_precision() -> RaceResult:
  """A CNN in float32, in float16 alone, and in float16 with loss scale and masters."""
  return _together(
    {
      name: _on_digits(
        _half(recipe.dtype),
        half.loss_fn,
        {name: recipe.make()},
        epochs=15,
      )
      for name, recipe in half.RECIPES.items()
    }
  )


def masters() -> RaceResult:
  """A CNN in float32, and in bfloat16 without and with masters: Adam at a rate of 3e-4."""
  adam = functools.partial(optax.adam, 3e-4)
  recipes = {
    "float32": (jnp.dtype("float32"), adam()),
    "bfloat16": (_BFLOAT, adam()),
    "bfloat16, masters": (_BFLOAT, optax_boost.master_weights(adam())),
    "the same, stochastic": (_BFLOAT, optax_boost.master_weights(adam(), key=jax.random.key(0))),
  }
  return _together(
    {
      name: _on_digits(
        _half(dtype),
        half.loss_fn,
        {name: tx},
        epochs=30,
      )
      for name, (dtype, tx) in recipes.items()
    }
  )


def accumulation() -> dict[str, RaceResult]:
  """SGD on batches of 256, on batches of 64, and on four times 64 accumulated."""
  network, sgd = _half(jnp.dtype("float32")), optax.sgd(0.1, 0.9)
  small = {"batches of 64": sgd, "4 x 64, accumulated": optax_boost.accumulate(sgd, every=4)}
  return {
    "SGD on batches of 256": _on_digits(network, half.loss_fn, {"batches of 256": sgd}, 10, 256),
    "SGD on batches of 64, as they are and four accumulated": _on_digits(
      network, half.loss_fn, small, 10
    ),
  }


def accumulation_memory() -> str:
  """Temporary memory of the steps of `accumulation`."""
  sgd = optax.sgd(0.1, 0.9)
  made = {
    "batches of 256": (sgd, 256),
    "batches of 64": (sgd, 64),
    "4 x 64, accumulated": (optax_boost.accumulate(sgd, every=4), 64),
  }
  graph, params = nnx.split(half.CNN(jnp.dtype("float32"), rngs=nnx.Rngs(0)))
  images, labels = digits().train
  found = []
  for name, (tx, size) in made.items():

    def step(params: Any, state: Any, batch: Any, tx: Any = tx) -> Any:
      grads = jax.grad(lambda params: half.loss_fn(nnx.merge(graph, params), batch))(params)
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    batch = {"images": images[:size], "labels": labels[:size]}
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), batch).compile()
    found.append(f"{name} {compiled.memory_analysis().temp_size_in_bytes / 1e6:.2f} MB")
  return f"\nTemporary memory of a step: {', '.join(found)}.\n"


def accumulation_picture(results: Mapping[str, RaceResult]) -> Figure:
  """Test accuracy by images seen."""
  figure = Figure(figsize=(7, 3.6), dpi=100, layout="constrained")
  axes = figure.subplots()
  styles = {
    "batches of 64": (plot.OTHERS, "-", 2),
    "batches of 256": (plot.YELLOW, "-", 6),
    "4 x 64, accumulated": (plot.OURS, "--", 2),
  }
  for size, result in zip((256, 64), results.values(), strict=True):
    for name, curves in result.curves.items():
      colour, style, width = styles[name]
      mean = curves[_training.ACCURACY].mean(0)
      axes.plot(
        result.spent[name]["steps"] * size,
        mean,
        style,
        color=colour,
        linewidth=width,
        label=name,
        zorder=3 - width / 9,
      )
  axes.set(xlabel="images seen", ylabel="test accuracy, %")
  plot.clean(axes)
  axes.legend(frameon=False, loc="lower right")
  return figure


def switching() -> RaceResult:
  """Adam, then SGD: make demo-large-batch's network, batches of 64, 6 epochs."""
  steps = 6 * _training.steps_per_epoch(digits(), 64)
  adam, sgd = functools.partial(optax.adam, 2e-3), functools.partial(optax.sgd, 0.02, 0.9)
  methods = {
    "adam": adam(),
    "sgd": sgd(),
    "adam, then sgd": optax_boost.switch_after(steps // 3, adam(), sgd()),
  }
  return _on_digits(CNN, _model.loss_fn, methods, epochs=6)


@dataclasses.dataclass(frozen=True)
class Race:
  """A race, or several for one picture.

  Attributes:
    run: trains; returns the results by their headings.
    draw: makes the picture of them; None: no picture.
    note: what stands below the last table.
  """

  run: Callable[[], Mapping[str, RaceResult]]
  draw: Callable[[Mapping[str, RaceResult]], Figure] | None
  note: Callable[[], str] = str


def _alone(make: Callable[[], RaceResult], **kwargs: Any) -> Race:
  heading = make.__doc__.partition("\n")[0]
  return Race(lambda: {heading: make()}, lambda results: results[heading].plot(**kwargs))


_LOSS_TOO = {"against": ("steps",), "quantities": (_training.ACCURACY, "training loss")}
RACES = {
  "large_batches": _alone(large_batches, **_LOSS_TOO),
  "normalized": dataclasses.replace(_alone(normalized), draw=None),
  "lars_start": dataclasses.replace(_alone(lars_start), draw=None),
  "freezing": dataclasses.replace(_alone(freezing), draw=None),
  "svrg": _alone(convex, against=("gradient_evaluations",)),
  "centralize": Race(
    lambda: {
      "Centralization by learning rate: one BatchNorm": centralization(CNN),
      "Centralization by learning rate: a BatchNorm after every convolution": centralization(
        Normalized
      ),
    },
    centralization_picture,
  ),
  "half_precision": _alone(half_precision, **_LOSS_TOO),
  "master_weights": _alone(masters, **_LOSS_TOO),
  "accumulate": Race(accumulation, accumulation_picture, accumulation_memory),
  "switch_after": _alone(switching, **_LOSS_TOO),
}


def main(arguments: list[str] | None = None) -> None:
  """Runs the races named on the command line, or all."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument(
    "names", nargs="*", metavar="name", help=f"of {', '.join(RACES)}; default: all"
  )
  parser.add_argument("--rounds", type=int, help="ignored: races repeat by seeds")
  parser.add_argument("--out", type=pathlib.Path, help="a folder for tables and pictures")
  options = parser.parse_args(arguments)
  for name in options.names:
    if name not in RACES:
      parser.error(f"unknown race '{name}'; choose from {', '.join(RACES)}")
  wanted = options.names or list(RACES)
  figures = options.out or plot.FIGURES
  figures.mkdir(parents=True, exist_ok=True)
  path = (options.out or _harness.HERE / "results") / "races.md"
  text = (
    path.read_text(encoding="utf-8")
    if path.exists()
    else "# Races\n\nMade by `python -m benchmarks.races`.\n"
  )
  for name in wanted:
    results = RACES[name].run()
    for title, result in results.items():
      heading, rest = f"\n## {title}\n", ""
      before, found, after = text.partition(heading)
      if found and "\n## " in after:
        rest = "\n## " + after.partition("\n## ")[2]
      note = RACES[name].note() if title == list(results)[-1] else ""
      text = f"{before}{heading}\n{result.table()}\n{note}{rest}"
      print(result.table())
    temporary = path.with_suffix(".part")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    if (draw := RACES[name].draw) is not None:
      plot.small(draw(results), figures / f"{name}.png")


if __name__ == "__main__":
  main()
