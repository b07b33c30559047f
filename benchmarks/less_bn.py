"""Fewer BatchNorms: ``python -m benchmarks.less_bn --rounds 40 --out benchmarks/results``."""

import argparse
import pathlib

from flax import linen as nn
import jax
import jax.numpy as jnp

from benchmarks import _harness, freezing
import optax_boost.linen

_FULL = "all BatchNorms"
_ABOUT = """\
One train step of a Linen module (forward, backward, SGD with momentum and
weight decay, params and state donated) of a bottleneck ResNet-29 on images of 32 x 32, before and
after `less_bn`. Ratios are medians of the ratios within a round to the step of the whole network.
FLOPs and temporary memory are XLA's, of the compiled step."""


class BottleneckNet(nn.Module):
  """A stem, nine bottleneck blocks in three stages, and a head."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the logits."""

    def conv_norm(x: jax.Array, width: int, size: int, stride: int = 1) -> jax.Array:
      x = nn.Conv(width, (size, size), (stride, stride), use_bias=False)(x)
      return nn.BatchNorm(use_running_average=False)(x)

    x = nn.relu(conv_norm(x, 16, 3))
    for stage, width in enumerate((16, 32, 64)):
      for block in range(3):
        stride = 2 if stage and block == 0 else 1
        h = nn.relu(conv_norm(x, width, 1))
        h = nn.relu(conv_norm(h, width, 3, stride))
        h = conv_norm(h, 4 * width, 1)
        x = nn.relu(h + (x if block else conv_norm(x, 4 * width, 1, stride)))
    return nn.Dense(10)(jnp.mean(x, (1, 2)))


def main() -> None:
  """Measures and writes the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=40, help="quiet rounds to collect")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  keys = jax.random.split(jax.random.key(0))
  batch = {
    "x": jax.random.normal(keys[0], (32, 32, 32, 3)),
    "y": jax.random.randint(keys[1], (32,), 0, 10),
  }
  module = BottleneckNet()
  less = optax_boost.linen.less_bn
  fewer = less(module, batch["x"])
  modules = {
    _FULL: module,
    "less_bn": fewer,
    "less_bn, normalized head": less(module, batch["x"], fn_flag=True),
  }
  contenders = [
    freezing.contender(name, module, freezing.optimizer(), batch, "auto")
    for name, module in modules.items()
  ]
  title = f"{len(fewer.plan.removed)} of 31 BatchNorms removed, batch 32"
  comparisons = [_harness.compare(contenders, [_FULL], options.rounds, title)]
  where = _harness.machine(["jax", "jaxlib", "optax", "flax"])
  _harness.write("less_bn", _ABOUT, comparisons, where, options.out)


if __name__ == "__main__":
  main()
