"""One step of MXNet 1.9.1's SVRGModule: ``mxnet_svrg.py BATCH INPUTS [HIDDEN...] OUTPUTS``."""

import sys

import mxnet as mx
from mxnet.contrib.svrg_optimization.svrg_module import SVRGModule
import numpy as np
from serve import serve


def main() -> None:
  batch, inputs, *widths = map(int, sys.argv[1:])
  # One output is linear regression, several are classes.
  classes = widths[-1]
  output = mx.sym.Variable("data")
  for i, width in enumerate(widths):
    if i:
      output = mx.sym.Activation(output, act_type="relu")
    output = mx.sym.FullyConnected(output, num_hidden=width)
  label = mx.sym.Variable("label")
  head = mx.sym.LinearRegressionOutput if classes == 1 else mx.sym.SoftmaxOutput
  rng = np.random.default_rng(0)
  x = rng.standard_normal((batch, inputs), dtype=np.float32)
  y = rng.standard_normal((batch, 1)) if classes == 1 else rng.integers(classes, size=batch)
  data = mx.io.NDArrayIter(x, y.astype(np.float32), batch, label_name="label")
  module = SVRGModule(head(output, label), ["data"], ["label"], update_freq=1)
  module.bind(data.provide_data, data.provide_label)
  module.init_params(mx.init.Uniform(0.05))
  module.init_optimizer(kvstore="local", optimizer="sgd", optimizer_params={"learning_rate": 1e-4})
  module.update_full_grads(data)
  data.reset()
  one = next(data)

  def step() -> None:
    module.forward(one, is_train=True)
    module.backward()
    module.update()
    mx.nd.waitall()

  serve(step)


if __name__ == "__main__":
  main()
