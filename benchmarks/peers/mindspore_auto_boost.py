"""Train steps at a level of MindSpore's AutoBoost: ``mindspore_auto_boost.py LEVEL BATCH STEPS``.

Each level has a process of its own, as the first configuration of a process counts for all.
"""

import sys

import mindspore as ms
from mindspore import boost, nn, ops
import numpy as np
from serve import serve


class ConvNorm(nn.Cell):
  """A convolution and its batch normalization."""

  def __init__(self, inputs, width, size, stride=1):
    super().__init__()
    self.conv = nn.Conv2d(inputs, width, size, stride, weight_init="HeNormal")
    # GradientFreeze knows by "bn" in the name what must stay with the convolution.
    self.bn = nn.BatchNorm2d(width)

  def construct(self, x):
    """Applies both."""
    return self.bn(self.conv(x))


class Bottleneck(nn.Cell):
  """Three convolutions beside a shortcut, which has one of its own where the width changes."""

  def __init__(self, inputs, width, stride):
    super().__init__()
    outputs = 4 * width
    self.first = ConvNorm(inputs, width, 1)
    self.second = ConvNorm(width, width, 3, stride)
    self.third = ConvNorm(width, outputs, 1)
    self.relu, self.shortcut = nn.ReLU(), nn.Identity()
    if inputs != outputs:
      self.shortcut = ConvNorm(inputs, outputs, 1, stride)

  def construct(self, x):
    """Returns the block's output."""
    y = self.relu(self.second(self.relu(self.first(x))))
    return self.relu(self.third(y) + self.shortcut(x))


class ResNet(nn.Cell):
  """The ResNet-11 of ``benchmarks/auto_boost.py``, channels first."""

  def __init__(self):
    super().__init__()
    self.stem, self.relu = ConvNorm(1, 16, 3), nn.ReLU()
    blocks, inputs = [], 16
    for stage, width in enumerate((16, 32, 64)):
      blocks.append(Bottleneck(inputs, width, 2 if stage else 1))
      inputs = 4 * width
    self.blocks = nn.SequentialCell(blocks)
    self.mean, self.head = ops.ReduceMean(), nn.Dense(inputs, 10)

  def construct(self, x):
    """Returns the logits."""
    return self.head(self.mean(self.blocks(self.relu(self.stem(x))), (2, 3)))


def trained(level: str):
  """The step that a user of the level gets, and the network's last parameter.

  Args:
    level: ``plain``, or a level with what is switched off behind it, as in ``O1-gc_flag``.
  """
  network = ResNet()
  optimizer = nn.Momentum(
    network.trainable_params(), 0.05, 0.9, weight_decay=1e-4, use_nesterov=True
  )
  loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
  with_loss = nn.WithLossCell(network, loss).set_train()
  if level == "plain":
    cell = nn.TrainOneStepCell(with_loss, optimizer)
  else:
    level, _, without = level.partition("-")
    config = {"less_bn": {flag: False for flag in without.split("-") if flag}}
    processor = boost.AutoBoost(level, config)
    with_loss, optimizer = processor.network_auto_process_train(with_loss, optimizer)
    cell = boost.BoostTrainOneStepCell(with_loss, optimizer, sens=1.0)
  return cell.set_train(), network.trainable_params()[-1]


def main() -> None:
  ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
  np.random.seed(0)
  level, batch, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
  x = ms.Tensor(np.random.standard_normal((batch, 1, 8, 8)), ms.float32)
  y = ms.Tensor(np.random.randint(0, 10, batch), ms.int32)
  cell, last = trained(level)

  def run() -> None:
    for _ in range(steps):
      cell(x, y).asnumpy()
    last.value().asnumpy()

  serve(run)


if __name__ == "__main__":
  main()
