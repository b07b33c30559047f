"""The results of a run of the demo: a table of ratios, sentences and a picture."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from _transformer_training import Memory, Run
from matplotlib.figure import Figure
import numpy as np

O0, O1 = "O0", "O1"
ALL, HALF, DECAY = "all layers", "last half", "layer-wise decay"
AT_ONCE, MICRO_BATCHES = "at once", 8
AFTER, INSIDE, DEEP = "after the backward pass", "inside of it", 48

# Okabe and Ito's colours, told apart by colour-blind eyes too.
_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#5A5A5A"
_COLOURS = {O0: _GREY, O1: _BLUE, ALL: _GREY, HALF: _BLUE, DECAY: _ORANGE}
# The picture is for readers who don't know levels.
_SHOWN = {O0: "plain training", O1: "short sequences first"}


class Results(NamedTuple):
  """The results of one run of the demo.

  Attributes:
    training: from scratch, by level.
    before: the loss on the other text before fine-tuning.
    tuning: fine-tuning, by way.
    memory: bytes of a step on a large batch, at once and in micro-batches.
    updates: of a deep model's step after the backward pass, and inside of it.
    prices: the time of a step at each length, relative to the full one, as O1 measured it.
    kept: the lengths that O1 trained on.
  """

  training: dict[str, Run]
  before: float
  tuning: dict[str, Run]
  memory: dict[str, int]
  updates: dict[str, Memory]
  prices: dict[int, float]
  kept: Sequence[int]


def time_to(loss: float, losses: np.ndarray, times: np.ndarray) -> float | None:
  """The time at which a loss is first reached, on a line between evaluations; None: never."""
  reached = np.flatnonzero(losses <= loss)
  if not len(reached):
    return None
  last = reached[0]
  if last == 0:
    return float(times[0])
  return float(np.interp(loss, losses[[last, last - 1]], times[[last, last - 1]]))


def speedup(results: Results, by: str = "seconds") -> float | None:
  """The share of O0's time in which O1 gets to O0's last loss; None if it never does.

  Args:
    results: of a run of the demo.
    by: ``"seconds"``, processor time of the steps, or ``"clock"``, with compiling.
  """
  plain, boosted = results.training[O0], results.training[O1]
  time = time_to(plain.losses[-1], boosted.losses, getattr(boosted, by))
  return None if time is None else time / getattr(plain, by)[-1]


def report(results: Results) -> str:
  """The table, its conclusions, and the lines of code behind them."""
  return "\n\n".join([_table(results), "\n".join(_sentences(results)), _CODE])


_CODE = f"""In your code:
  O1                boost = optax_boost.auto_boost("O1", steps, sequence_length=length)
                    tx = boost.optimizer(adamw, loss_fn, params, batch)
                    boost.measure(step.on_copy(state), batch)
                    step(state, boost.batch(batch, number))
  last half         names = ["embed", "blocks/*", "head"]  # in the order of the forward pass
                    groups = optax_boost.layer_groups(params, names, num_groups=2)
                    optax_boost.freeze_layers(adamw, groups, optax_boost.fixed_freezing(2, 1))
  layer-wise decay  optax_boost.layerwise_decay(adamw, groups, 0.75)
  micro-batches     optax_boost.accumulate(adamw, every={MICRO_BATCHES})
  inside of it      optax_boost.make_train_step(loss_fn, adamw, update_in_backward=True)"""


def _table(results: Results) -> str:
  rows = [("", "", "time", "loss", "memory of a step")]
  for part, runs in (("from scratch", results.training), ("fine-tuning", results.tuning)):
    first = next(iter(runs.values()))
    for name, run in runs.items():
      time = _ratio(run.seconds[-1], first.seconds[-1], "s", run is first)
      memory = _ratio(run.memory / 1e6, first.memory / 1e6, "MB", run is first)
      rows.append((part if run is first else "", name, time, f"{run.losses[-1]:.3f}", memory))
  whole = results.memory[AT_ONCE] / 1e6
  for name, size in results.memory.items():
    memory = _ratio(size / 1e6, whole, "MB", name == AT_ONCE)
    rows.append(("large batch" if name == AT_ONCE else "", name, "", "", memory))
  after = results.updates[AFTER].whole / 1e6
  for name, sizes in results.updates.items():
    memory = _ratio(sizes.whole / 1e6, after, "MB", name == AFTER)
    rows.append((f"{DEEP} layers" if name == AFTER else "", name, "", "", memory))
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = [
    "  ".join(
      cell.ljust(width) if i < 2 else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    for row in rows
  ]
  lines.insert(1, "-" * max(map(len, lines)))
  notes = [
    "Time: processor seconds of all steps, without compiling and evaluating. Loss: nats per",
    "character of test text, in whole sequences; O1 trains on shorter ones for half of its steps.",
    "Memory: by XLA's account of the step, with params and optimizer.",
  ]
  return "\n".join([*lines, "", *notes])


def _ratio(value: float, base: float, unit: str, is_base: bool) -> str:
  return f"{base:.1f} {unit} = 1.00" if is_base else f"{value / base:.2f}"


def _sentences(results: Results) -> list[str]:
  plain, boosted = results.training[O0], results.training[O1]
  share, loss = speedup(results), plain.losses[-1]
  *short, full = results.prices
  priced = " and ".join(f"{results.prices[length]:.2f} on {length}" for length in short)
  kept = ", ".join(map(str, results.kept))
  first = f"Measured on this device, a step takes {priced} of its time on {full} characters: O1"
  ends = f"\ntrained on sequences of {kept}."
  first += "\nkept sequences whole, as O0 does." if len(results.kept) == 1 else ends
  lines = [first]
  if share is None:
    lines += [
      f"O1 did not get to O0's loss of {loss:.3f}: it ended at {boosted.losses[-1]:.3f}, after"
      f" {boosted.seconds[-1] / plain.seconds[-1]:.2f} of O0's time."
    ]
  else:
    lines += [
      f"O1 got to O0's loss of {loss:.3f} in {share:.2f} of O0's time.",
      f"By the clock, with compiling (O0: {plain.programs} program, O1: {boosted.programs}) and"
      f" measuring, in {speedup(results, 'clock'):.2f}; a longer\ntraining takes no longer for"
      " these.",
    ]
  every, half, decay = (results.tuning[name] for name in (ALL, HALF, DECAY))
  (_, whole), (name, parts) = results.memory.items()
  updates = results.updates[INSIDE].temporary / results.updates[AFTER].temporary
  return [
    *lines,
    f"Fine-tuned from a loss of {results.before:.3f}: with the first half of the layers frozen in"
    f" {half.seconds[-1] / every.seconds[-1]:.2f} of the time and\n{half.memory / every.memory:.2f}"
    f" of the memory of all layers, to a loss {_difference(half, every)};"
    f" with layer-wise decay to one\n{_difference(decay, every)}.",
    f"A large batch in {name} takes {parts / whole:.2f} of the memory, for the same step.",
    f"With {DEEP} layers, AdamW's step inside of the backward pass takes {updates:.2f} of the"
    " temporary memory, for\nthe same params.",
    "One seed of a short training says little:"
    "\nbenchmarks/results/long_levels_evidence.md has three seeds of longer ones.",
  ]


def _difference(run: Run, base: Run) -> str:
  difference = run.losses[-1] - base.losses[-1]
  return f"{abs(difference):.3f} {'higher' if difference > 0 else 'lower'}"


def picture(results: Results) -> Figure:
  """Draws the losses against time, and the memory."""
  figure = Figure(figsize=(15, 5.6), dpi=100, layout="constrained")
  left, middle, right = figure.subplots(1, 3, width_ratios=(1.25, 1.25, 0.8))
  figure.get_layout_engine().set(wspace=0.05)
  _draw_training(left, results)
  _draw_tuning(middle, results)
  _draw_memory(right, results)
  for axes in (left, middle, right):
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=13.5)
  for axes in (left, middle):
    axes.set_xlabel("seconds of processor time", fontsize=14)
    axes.set_ylabel("test loss, nats per character", fontsize=14)
    axes.set_xlim(left=0)
  figure.draw_without_rendering()  # the layout, which says where lines lie
  _name_ends(left, results.training)
  _name_ends(middle, results.tuning)
  return figure


def _title(axes: Any, what: str, finding: str) -> None:
  axes.set_title(what + "\n" * 3, loc="left", fontsize=14, color=_GREY)
  axes.text(0, 1.03, finding, transform=axes.transAxes, fontsize=19, fontweight="bold")


def _draw_training(axes: Any, results: Results) -> None:
  share, plain = speedup(results), results.training[O0]
  finding = "Short sequences first:\nnever the same loss"
  if share is not None:
    finding = f"Short sequences first:\nsame loss in {share:.2f} of the time"
  if len(results.kept) == 1:
    finding = "Short sequences save\nno time on this device"
  _title(axes, "Training from scratch", finding)
  for name, run in results.training.items():
    axes.plot(run.seconds, run.losses, color=_COLOURS[name], linewidth=3)
  loss, end = plain.losses[-1], plain.seconds[-1]
  axes.axhline(loss, color=_GREY, linewidth=1.5, linestyle=":", zorder=0)
  if share is not None:
    axes.plot(share * end, loss, "o", color="white", markeredgecolor=_BLUE, markersize=11, zorder=4)
  # The first evaluations would press the rest together.
  losses = np.concatenate([run.losses[len(run.losses) // 8 :] for run in results.training.values()])
  spread = losses.max() - losses.min()
  axes.set_ylim(losses.min() - 0.15 * spread, losses.max())


def _draw_tuning(axes: Any, results: Results) -> None:
  runs = results.tuning
  share = runs[HALF].seconds[-1] / runs[ALL].seconds[-1]
  _title(axes, "Fine-tuning", f"Half of the layers frozen:\n{share:.2f} of the time")
  for name, run in runs.items():
    seconds, losses = np.append(0.0, run.seconds), np.append(results.before, run.losses)
    axes.plot(seconds, losses, color=_COLOURS[name], linewidth=3)
  axes.margins(0.15)


def _name_ends(axes: Any, runs: dict[str, Run]) -> None:
  """Marks the ends of the curves, and names each near its end, off all lines and other names."""
  for name, run in runs.items():
    axes.plot(run.seconds[-1], run.losses[-1], "o", color=_COLOURS[name], markersize=11)
  curves = [line.get_path().transformed(line.get_transform()) for line in axes.lines]
  inside, taken = axes.get_window_extent(), []

  def collisions(label: Any) -> int:
    box = label.get_window_extent().padded(5)
    crossed = sum(curve.intersects_bbox(box, filled=False) for curve in curves)
    ends = sum(box.padded(8).count_contains(curve.vertices[-1:]) for curve in curves)
    corners_outside = 4 - inside.count_contains(box.corners())
    return crossed + ends + box.count_overlaps(taken) + corners_outside

  for name in sorted(runs, key=lambda name: -len(_SHOWN.get(name, name))):  # the longest fits least
    run = runs[name]
    label = axes.annotate(
      _SHOWN.get(name, name),
      (run.seconds[-1], run.losses[-1]),
      (0, 0),
      textcoords="offset points",
      fontsize=17,
      fontweight="bold",
      color=_COLOURS[name],
    )
    places = [
      {"position": (0, side * away), "ha": ha, "va": "bottom" if side > 0 else "top"}
      for away in range(12, 120, 4)
      for side in (1, -1)
      for ha in ("right", "center")
    ]
    label.set(**min(places, key=lambda place: (label.set(**place), collisions(label))[1]))
    taken.append(label.get_window_extent())


def _draw_memory(axes: Any, results: Results) -> None:
  (_, whole), (name, parts) = results.memory.items()
  _title(axes, "Step on a large batch", f"{name}:\n{parts / whole:.2f} of the memory")
  bars = axes.bar([AT_ONCE, name], [whole / 1e6, parts / 1e6], color=[_GREY, _BLUE], width=0.6)
  axes.bar_label(bars, fmt="%.0f MB", fontsize=17, fontweight="bold", padding=4)
  axes.set_yticks([])
  axes.spines["left"].set_visible(False)
  axes.margins(y=0.15)
