"""One step of MindSpore's DimReduce cell: ``mindspore_dim_reduce.py COMPONENTS SHAPES_JSON``."""

import json
import sys

import mindspore as ms
from mindspore import nn, ops
from mindspore.boost.dim_reduce import DimReduce
import numpy as np
from serve import serve


class Weights(nn.Cell):
  """Weights, and a loss of them that costs next to nothing and accepts every trial."""

  def __init__(self, shapes):
    super().__init__()
    self.weights = ms.ParameterTuple(
      [
        ms.Parameter(ms.Tensor(0.05 * np.random.standard_normal(s), ms.float32), name=f"w{i}")
        for i, s in enumerate(shapes)
      ]
    )
    self.first = self.weights[0]
    self.reduce = ops.ReduceSum()

  def construct(self, x):
    """Returns -1."""
    return x - 1 + 0 * self.reduce(self.first[:1, :1])


class Step(nn.Cell):
  """The cell with the gradients that it is given."""

  def __init__(self, reduced, weights, clones):
    super().__init__()
    self.reduced, self.weights, self.clones = reduced, weights, clones

  def construct(self, loss, grads, scale, x):
    """Makes one step."""
    return self.reduced(loss, grads, scale, self.weights, self.clones, x)


def main() -> None:
  ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
  k, shapes = int(sys.argv[1]), json.loads(sys.argv[2])
  np.random.seed(0)
  network = Weights(shapes)
  size = sum(int(np.prod(s)) for s in shapes)
  basis = np.random.standard_normal((k, size)).astype(np.float32)
  basis /= np.sqrt(np.float32(size))
  optimizer = nn.SGD(network.weights, learning_rate=1.0)
  reduced = DimReduce(
    network, optimizer, network.weights, basis, k, 0.55, 0.9, 1e-3, 0.4, rank=0, rank_size=1
  )
  del basis
  step = Step(reduced, network.weights, network.weights.clone(prefix="clone", init="same"))
  grads = tuple(ms.Tensor(0.01 * np.random.standard_normal(s), ms.float32) for s in shapes)
  loss, scale, x = (ms.Tensor(v, ms.float32) for v in (0.0, 1.0, 0.0))

  def once() -> None:
    step(loss, grads, scale, x).asnumpy()
    network.weights[-1].value().asnumpy()

  serve(once)


if __name__ == "__main__":
  main()
