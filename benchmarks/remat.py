"""Rematerialization's memory: ``python -m benchmarks.remat``. Compiles, and runs nothing."""

import argparse
import pathlib
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from benchmarks import _harness, freezing
import optax_boost.linen

_ABOUT = """\
Temporary memory of one train step of a Linen module (momentum SGD with weight
decay) of a ResNet-20 on 64 images of 32 x 32, as XLA's compiler states it, without and with
`flax.linen.remat` around each residual block. The layers are written out, not scanned."""


class Block(nn.Module):
  """A residual block of two convolutions.

  Attributes:
    width: channels of its output.
    stride: of its first convolution.
  """

  width: int
  stride: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the block's output."""
    h = x
    for stride in (self.stride, 1):
      h = nn.Conv(self.width, (3, 3), (stride, stride), use_bias=False)(nn.relu(h))
      h = nn.BatchNorm(use_running_average=False)(h)
    if self.stride == 2:
      x = jnp.pad(x[:, ::2, ::2], ((0, 0), (0, 0), (0, 0), (0, self.width - x.shape[-1])))
    return nn.relu(x + h)


class Network(nn.Module):
  """A ResNet-20: a stem, nine residual blocks, and a head.

  Attributes:
    block: the class of its blocks.
  """

  block: Any

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the logits."""
    x = nn.BatchNorm(use_running_average=False)(nn.Conv(16, (3, 3), use_bias=False)(x))
    for stage, width in enumerate((16, 32, 64)):
      for position in range(3):
        x = self.block(width, 2 if stage and position == 0 else 1)(x)
    return nn.Dense(10)(jnp.mean(x, (1, 2)))


def temporary_megabytes(block: Any) -> float:
  """The temporary memory of a train step of the network with such blocks."""
  batch = {"x": jnp.zeros((64, 32, 32, 3)), "y": jnp.zeros(64, int)}
  module = Network(block)
  variables = module.init(jax.random.key(0), batch["x"])
  loss, *arrays = optax_boost.linen.split_loss(freezing.loss_fn, module, variables)
  step = optax_boost.make_train_step(loss, freezing.optimizer())
  state = step.init(*arrays)
  return step.lower(state, batch).compile().memory_analysis().temp_size_in_bytes / 1e6


def main() -> None:
  """Compiles both and writes the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, help="ignored: compiled memory has no spread")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  rows = {"kept": Block, "`nn.remat` around each block": nn.remat(Block)}
  table = ["| activations | temporary MB |", "|---|---|"]
  table += [f"| {name} | {temporary_megabytes(block):.0f} |" for name, block in rows.items()]
  _harness.write_lines("remat", _ABOUT, table, ["jax", "jaxlib", "flax"], options.out)
  print("\n".join(table))


if __name__ == "__main__":
  main()
