"""Freezing per depth: ``python -m benchmarks.freezing --rounds 40 --out benchmarks/results``.

With ``--counts``: what step counts of their own cost the groups.
"""

import argparse
from collections.abc import Callable, Mapping
import contextlib
import pathlib
import time
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import optax

from benchmarks import _harness, plot
import optax_boost
import optax_boost.linen

_GROUPS = 10
_DEPTHS = (0, 2, 4, 6, 9)
_PLAIN = "no freezing"
_THEIR_PLAIN = "MindSpore, no freezing"
_ABOUT = f"""\
One train step of a Linen module (forward, backward, SGD with momentum and
weight decay, params and state donated) of a model in {_GROUPS} groups, of which the first so many
are frozen. Ratios are medians of the ratios within a round to the same step of the same optimizer
without `freeze_layers`. Each depth is one compiled step. FLOPs and temporary memory are XLA's, of
the compiled step.

The tables "beside MindSpore" measure ours and MindSpore 2.10.0 (graph mode, CPU, each step in a
process of its own) in the same rounds. What freezing saves is read in the column of the *own*
unfrozen step: `x {_PLAIN}` for ours, `x {_THEIR_PLAIN}` for MindSpore's, which is
`nn.TrainOneStepCell` with `nn.SGD`, the same momentum and weight decay. `freeze_cell` is the cell
that `mindspore.boost.freeze_cell` makes for the depth, compiled alone; `all depths` is
`BoostTrainOneStepCell`, the step that a user of MindSpore Boost gets: the cells of all ten depths
in one graph, chosen at run time. The groups of the CNN are those of `GradientFreeze`, and the same
as ours. Those of the MLP are given to `FreezeOpt` as ours: `GradientFreeze` puts two dense layers
into one group, finds five where ten are asked for, and then freezes nothing at any depth."""


_ABOUT_COUNTS = f"""\
Adam in `freeze_layers` with {_GROUPS} groups, each with its own step count, beside the same Adam
whose one count all groups share: `counts="run"`. Params and state are donated. "Update" is
`tx.update` and `optax.apply_updates` in one's own `jit`, where the depth is not known while
tracing; "train step" is `make_train_step` with nothing frozen. Times are processor time, and ratios
are medians of the ratios within a round."""


class ConvNet(nn.Module):
  """A ResNet-20-like network: a stem, nine residual blocks of two convolutions, and a head."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the logits."""

    def conv_norm(x: jax.Array, width: int, stride: int = 1) -> jax.Array:
      x = nn.Conv(width, (3, 3), (stride, stride), use_bias=False)(x)
      return nn.BatchNorm(use_running_average=False)(x)

    x = nn.relu(conv_norm(x, 16))
    for stage, width in enumerate((16, 32, 64)):
      for block in range(3):
        stride = 2 if stage and block == 0 else 1
        h = conv_norm(nn.relu(conv_norm(x, width, stride)), width)
        if stride == 2:
          x = jnp.pad(x[:, ::2, ::2], ((0, 0), (0, 0), (0, 0), (0, width - x.shape[-1])))
        x = nn.relu(x + h)
    return nn.Dense(10)(jnp.mean(x, (1, 2)))


class Perceptron(nn.Module):
  """Nine dense layers and a head; of CIFAR-10 images the first is the largest."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the logits."""
    for _ in range(_GROUPS - 1):
      x = nn.relu(nn.Dense(512)(x))
    return nn.Dense(10)(x)


def loss_fn(model: Callable[[jax.Array], jax.Array], batch: Any) -> jax.Array:
  """Cross-entropy."""
  return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def optimizer() -> optax.GradientTransformation:
  """What is frozen."""
  return optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.01, momentum=0.9))


def contender(
  name: str, module: nn.Module, tx: optax.GradientTransformation, batch: Any
) -> _harness.Contender:
  """Compiles a train step.

  Args:
    name: of the contender.
    module: the model.
    tx: the optimizer.
    batch: what every step gets.
  """
  variables = module.init(jax.random.key(0), batch["x"])
  loss, *arrays = optax_boost.linen.split_loss(loss_fn, module, variables)
  step = optax_boost.make_train_step(loss, tx)
  state = step.init(*arrays)
  start = time.perf_counter()
  compiled = step.lower(state, batch).compile()
  facts = {"trace and compile, s": time.perf_counter() - start}
  facts["GFLOPs"] = compiled.cost_analysis()["flops"] / 1e9
  facts["temp MB"] = compiled.memory_analysis().temp_size_in_bytes / 1e6

  def run() -> float:
    nonlocal state
    start = time.perf_counter()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    return time.perf_counter() - start

  run()
  run()
  return _harness.Contender(name, run, facts)


def groups_of(module: nn.Module, batch: Any) -> optax_boost.LayerGroups:
  """The groups of a model's layers."""
  params = jax.eval_shape(module.init, jax.random.key(0), batch["x"])["params"]
  layers = ["Conv_*|BatchNorm_*"] if isinstance(module, ConvNet) else []
  return optax_boost.layer_groups(params, [*layers, "Dense_*"], num_groups=_GROUPS)


def fixed(plan: optax_boost.LayerGroups, depth: int) -> optax.GradientTransformation:
  """The optimizer with so many groups frozen in every step."""
  schedule = optax_boost.fixed_freezing(_GROUPS, depth)
  return optax_boost.freeze_layers(optimizer(), plan, schedule)


def compare(title: str, module: nn.Module, batch: Any, rounds: int) -> Any:
  """Runs all depths of one model.

  Args:
    title: of the table.
    module: the model.
    batch: what every step gets.
    rounds: quiet rounds to collect.
  """
  plan = groups_of(module, batch)
  print(plan)
  contenders = [contender(_PLAIN, module, optimizer(), batch)]
  contenders += [
    contender(f"{depth} frozen", module, fixed(plan, depth), batch) for depth in _DEPTHS
  ]
  return _harness.compare(contenders, [_PLAIN], rounds, title)


def beside_mindspore(title: str, name: str, module: nn.Module, batch: Any, rounds: int) -> Any:
  """Runs all depths of one model here and in MindSpore.

  Args:
    title: of the table.
    name: of the model in ``benchmarks/peers/mindspore_freeze.py``.
    module: the model.
    batch: what every step of ours gets.
    rounds: quiet rounds to collect.
  """
  plan = groups_of(module, batch)
  contenders = [contender(_PLAIN, module, optimizer(), batch)]
  contenders += [
    contender(f"{depth} frozen", module, fixed(plan, depth), batch) for depth in _DEPTHS
  ]
  theirs = [(_THEIR_PLAIN, "plain", 0)]
  theirs += [(f"MindSpore freeze_cell, {depth} frozen", "cell", depth) for depth in _DEPTHS]
  theirs += [(f"MindSpore all depths, {depth} frozen", "boost", depth) for depth in (0, 9)]
  with contextlib.ExitStack() as running:
    contenders += [
      running.enter_context(
        _harness.peer(row, _harness.MINDSPORE, "mindspore_freeze.py", name, form, str(depth))
      )
      for row, form, depth in theirs
    ]
    return _harness.compare(contenders, [_PLAIN, _THEIR_PLAIN], rounds, title)


def update_alone(name: str, tx: optax.GradientTransformation, params: Any) -> _harness.Contender:
  """Compiles an update in a jit of its own.

  Args:
    name: of the contender.
    tx: the optimizer.
    params: the params, which also are the gradients.
  """

  def step(params: Any, state: Any, gradients: Any) -> Any:
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  gradients = jax.tree.map(lambda x: 0.1 * x, params)
  # The first trace in a process fills JAX's caches.
  jax.make_jaxpr(lambda *args: step(*args))(params, tx.init(params), gradients)
  start = time.process_time()
  lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), gradients)
  facts = {"trace, s": time.process_time() - start}
  start = time.process_time()
  compiled = lowered.compile()
  facts["compile, s"] = time.process_time() - start
  facts["GFLOPs"] = compiled.cost_analysis()["flops"] / 1e9
  facts["temp MB"] = compiled.memory_analysis().temp_size_in_bytes / 1e6
  carry = jax.tree.map(jnp.copy, (params, tx.init(params)))
  return _harness.carried(name, compiled, carry, gradients, facts=facts)


def compare_counts(batch: Any, rounds: int) -> list[Any]:
  """Compares a count for each group with one for all.

  Args:
    batch: of the train step.
    rounds: quiet rounds to collect.
  """
  counts = {"one count": "run", "a count per group": "group"}
  shared, adam = next(iter(counts)), optax.adam(1e-3)
  schedule = optax_boost.gradual_unfreezing(_GROUPS, every=100)
  leaves = {f"layer_{i:03d}": jnp.ones((128, 128)) for i in range(161)}
  patterns = [f"layer_{i:02d}[0-9]" for i in range(_GROUPS - 1)]
  patterns.append("layer_09[0-9]|layer_1[0-9][0-9]")
  stacked = {"blocks": jnp.ones((12, 512, 512)), "head": jnp.ones(512)}
  plan = optax_boost.layer_groups(stacked, ["blocks[*]", "head"], num_groups=_GROUPS)
  comparisons = []
  for title, params, groups in (
    ("Update of 161 leaves", leaves, patterns),
    ("Update of 12 stacked layers", stacked, plan),
  ):
    contenders = [
      update_alone(name, optax_boost.freeze_layers(adam, groups, schedule, counts=of), params)
      for name, of in counts.items()
    ]
    timed = list(map(_harness.in_processor_time, contenders))
    comparisons.append(_harness.compare(timed, [shared], rounds, title))
  module = Perceptron()
  plan = groups_of(module, batch)
  # Nothing is frozen in the measured steps; later ones train each group in other steps.
  steps = [0, *range(1_000_000, 1_000_000 + _GROUPS)]
  unfrozen = optax_boost.FreezeSchedule(steps, [0, *range(_GROUPS)])
  contenders = [
    contender(name, module, optax_boost.freeze_layers(adam, plan, unfrozen, counts=of), batch)
    for name, of in counts.items()
  ]
  title = "Train step of the MLP: 3072 inputs, nine layers of 512, batch 256"
  timed = list(map(_harness.in_processor_time, contenders))
  return [*comparisons, _harness.compare(timed, [shared], rounds, title)]


def picture(ours: Mapping[str, Any], beside_theirs: Mapping[str, Any]) -> Figure:
  """Draws the time of a step by frozen groups, ours and MindSpore's, each over its own unfrozen."""
  measured = {
    "freeze_layers": (ours, "{} frozen", _PLAIN),
    "MindSpore's freeze_cell": (beside_theirs, "MindSpore freeze_cell, {} frozen", _THEIR_PLAIN),
  }
  lines = {}
  for name, (comparison, row_name, plain) in measured.items():
    rows = {row["name"]: row["ratios"][plain] for row in comparison["rows"]}
    lines[name] = [(depth, rows[row_name.format(depth)]) for depth in _DEPTHS]
  title = "ResNet-20: time of a train step / time without freezing"
  return plot.ratios(lines, f"frozen groups of {_GROUPS}", title, _PLAIN)


def main() -> None:
  """Measures both models and writes the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=40, help="quiet rounds to collect")
  parser.add_argument("--counts", action="store_true", help="measure the groups' step counts")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  keys = jax.random.split(jax.random.key(0), 4)
  images = {
    "x": jax.random.normal(keys[0], (64, 32, 32, 3)),
    "y": jax.random.randint(keys[1], (64,), 0, 10),
  }
  vectors = {
    "x": jax.random.normal(keys[2], (256, 3072)),
    "y": jax.random.randint(keys[3], (256,), 0, 10),
  }
  rounds = options.rounds
  where = _harness.machine(["jax", "jaxlib", "optax", "flax"])
  if options.counts:
    comparisons = compare_counts(vectors, rounds)
    _harness.write("group_counts", _ABOUT_COUNTS, comparisons, where, options.out)
    return
  mlp, cnn = Perceptron(), ConvNet()
  comparisons = [
    compare("MLP: 3072 inputs, nine layers of 512, batch 256", mlp, vectors, rounds),
    compare("CNN: ResNet-20, batch 64", cnn, images, rounds),
    beside_mindspore("MLP beside MindSpore", "mlp", mlp, vectors, rounds),
    beside_mindspore("CNN beside MindSpore", "cnn", cnn, images, min(rounds, 3)),
  ]
  _harness.write("freezing", _ABOUT, comparisons, where, options.out)
  if options.out == _harness.HERE / "results":
    plot.small(picture(comparisons[1], comparisons[3]), plot.FIGURES / "freezing.png")


if __name__ == "__main__":
  main()
