"""One train step of MindSpore's GradientFreeze: ``mindspore_freeze.py NETWORK FORM DEPTH``.

NETWORK is ``mlp`` or ``cnn``. FORM is ``plain`` (no freezing, DEPTH unused), ``cell`` (the cell
that ``freeze_cell`` makes for the depth, compiled alone) or ``boost`` (``BoostTrainOneStepCell``,
which holds the cells of all depths and takes the depth from its strategy at run time).
"""

import sys

import mindspore as ms
from mindspore import boost, nn, ops
import numpy as np
from serve import serve

_GROUPS = 10


class ConvNorm(nn.Cell):
  """A convolution and its batch normalization."""

  def __init__(self, inputs, width, stride=1):
    super().__init__()
    self.conv = nn.Conv2d(inputs, width, 3, stride, weight_init="HeNormal")
    # GradientFreeze knows by "bn" in the name what must stay with the convolution.
    self.bn = nn.BatchNorm2d(width)

  def construct(self, x):
    """Applies both."""
    return self.bn(self.conv(x))


class Block(nn.Cell):
  """A residual block whose shortcut is padded."""

  def __init__(self, inputs, width, stride):
    super().__init__()
    self.first, self.second = ConvNorm(inputs, width, stride), ConvNorm(width, width)
    self.relu, self.stride = nn.ReLU(), stride
    more = width - inputs
    self.pad = nn.Pad(((0, 0), (0, more), (0, 0), (0, 0)))

  def construct(self, x):
    """Returns the block's output."""
    h = self.second(self.relu(self.first(x)))
    if self.stride == 2:
      x = self.pad(x[:, :, ::2, ::2])
    return self.relu(x + h)


class ConvNet(nn.Cell):
  """The ResNet-20 of ``benchmarks/freezing.py``, channels first."""

  def __init__(self):
    super().__init__()
    self.stem, self.relu = ConvNorm(3, 16), nn.ReLU()
    blocks, inputs = [], 16
    for stage, width in enumerate((16, 32, 64)):
      for block in range(3):
        blocks.append(Block(inputs, width, 2 if stage and block == 0 else 1))
        inputs = width
    self.blocks = nn.SequentialCell(blocks)
    self.mean, self.head = ops.ReduceMean(), nn.Dense(64, 10)

  def construct(self, x):
    """Returns the logits."""
    return self.head(self.mean(self.blocks(self.relu(self.stem(x))), (2, 3)))


def perceptron() -> nn.Cell:
  """The MLP of ``benchmarks/freezing.py``."""
  layers = [nn.Dense(3072 if i == 0 else 512, 512, activation="relu") for i in range(_GROUPS - 1)]
  return nn.SequentialCell([*layers, nn.Dense(512, 10)])


def groups(network, optimizer, name):
  """What is trained at each depth: the params of the groups from there on."""
  if name == "cnn":
    freezer = boost.GradientFreeze(_GROUPS, 0, 0.5, 1)
    trained = freezer.split_parameters_groups(network, _GROUPS)
  else:
    # GradientFreeze puts two dense layers into one group, finds five where ten are asked for, and
    # then freezes nothing at any depth.
    params = network.trainable_params()
    trained = [params[2 * i :] for i in range(_GROUPS)]
  process = boost.ParameterProcess.generate_group_params
  return [process(params, optimizer.init_params["params"]) for params in trained]


def step(name, form, depth):
  """Returns a cell that makes one train step, and its batch."""
  if name == "cnn":
    network, shape = ConvNet(), (64, 3, 32, 32)
  else:
    network, shape = perceptron(), (256, 3072)
  x = ms.Tensor(np.random.standard_normal(shape), ms.float32)
  y = ms.Tensor(np.random.randint(0, 10, shape[0]), ms.int32)
  loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
  with_loss = nn.WithLossCell(network, loss).set_train()
  optimizer = nn.SGD(network.trainable_params(), 0.01, momentum=0.9, weight_decay=1e-4)
  if form == "plain":
    return nn.TrainOneStepCell(with_loss, optimizer).set_train(), (x, y)
  freezing = boost.FreezeOpt(optimizer, groups(network, optimizer, name), [depth] * _GROUPS)
  if form == "boost":
    return boost.BoostTrainOneStepCell(with_loss, freezing, sens=1.0).set_train(), (x, y)
  grad = ops.GradOperation(get_by_list=True, sens_param=True)
  cells = boost.freeze_cell(False, with_loss, freezing, 1.0, grad, False)
  return cells[depth].set_train(), (x, y)


def main() -> None:
  ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
  np.random.seed(0)
  cell, batch = step(sys.argv[1], sys.argv[2], int(sys.argv[3]))
  last = cell.network if hasattr(cell, "network") else cell.net
  trained = last.trainable_params()[-1]

  def once() -> None:
    cell(*batch).asnumpy()
    trained.value().asnumpy()

  serve(once)


if __name__ == "__main__":
  main()
