"""Freezing per depth: ``python -m benchmarks.freezing --rounds 40 --out benchmarks/results``."""

import argparse
from collections.abc import Callable
import contextlib
import pathlib
import time
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks import _harness
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
without `freeze_layers`. Each depth is one compiled step; the depth is read from the state before
each step. FLOPs and temporary memory are XLA's, of the compiled step.

The tables "beside MindSpore" measure ours and MindSpore 2.10.0 (graph mode, CPU, each step in a
process of its own) in the same rounds. What freezing saves is read in the column of the *own*
unfrozen step: `x {_PLAIN}` for ours, `x {_THEIR_PLAIN}` for MindSpore's, which is
`nn.TrainOneStepCell` with `nn.SGD`, the same momentum and weight decay. `freeze_cell` is the cell
that `mindspore.boost.freeze_cell` makes for the depth, compiled alone; `all depths` is
`BoostTrainOneStepCell`, the step that a user of MindSpore Boost gets: the cells of all ten depths
in one graph, chosen at run time. The groups of the CNN are those of `GradientFreeze`, and the same
as ours. Those of the MLP are given to `FreezeOpt` as ours: `GradientFreeze` puts two dense layers
into one group, finds five where ten are asked for, and then freezes nothing at any depth."""


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
  variables = module.init(jax.random.key(0), batch["x"])
  split = optax_boost.linen.split_loss(loss_fn, module, variables)
  plan = optax_boost.layer_groups(*split, batch, num_groups=_GROUPS)
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
  variables = module.init(jax.random.key(0), batch["x"])
  split = optax_boost.linen.split_loss(loss_fn, module, variables)
  plan = optax_boost.layer_groups(*split, batch, num_groups=_GROUPS)
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


def main() -> None:
  """Measures both models and writes the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=40, help="quiet rounds to collect")
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
  mlp, cnn = Perceptron(), ConvNet()
  comparisons = [
    compare("MLP: 3072 inputs, nine layers of 512, batch 256", mlp, vectors, rounds),
    compare("CNN: ResNet-20, batch 64", cnn, images, rounds),
    beside_mindspore("MLP beside MindSpore", "mlp", mlp, vectors, rounds),
    beside_mindspore("CNN beside MindSpore", "cnn", cnn, images, min(rounds, 3)),
  ]
  where = _harness.machine(["jax", "jaxlib", "optax", "flax"])
  _harness.write("freezing", _ABOUT, comparisons, where, options.out)


if __name__ == "__main__":
  main()
