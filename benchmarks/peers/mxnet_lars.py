"""MXNet 1.9.1's LARS over a list of tensors: ``mxnet_lars.py SHAPES_JSON AGGREGATE_NUM``."""

import json
import os
import sys

os.environ["MXNET_OPTIMIZER_AGGREGATION_SIZE"] = sys.argv[2]

import mxnet as mx
import numpy as np
from serve import serve


def main() -> None:
  shapes = json.loads(sys.argv[1])
  rng = np.random.default_rng(0)
  weights = [mx.nd.array(0.05 * rng.standard_normal(s), dtype="float32") for s in shapes]
  grads = [mx.nd.array(0.01 * rng.standard_normal(s), dtype="float32") for s in shapes]
  # MXNet tells a bias by its name, we by its rank.
  names = {i: f"{i}_weight" if len(s) > 1 else f"{i}_bias" for i, s in enumerate(shapes)}
  optimizer = mx.optimizer.LARS(
    learning_rate=0.1, momentum=0.9, wd=1e-4, eta=0.001, eps=1e-8, param_idx2name=names
  )
  # 1.9.1 exempts biases from weight decay; the other contenders decay them.
  optimizer.set_wd_mult(dict.fromkeys(names.values(), 1.0))
  states = [optimizer.create_state(i, w) for i, w in enumerate(weights)]
  # Module and Trainer hand the optimizer groups of this size.
  size = optimizer.aggregate_num
  groups = [list(range(i, min(i + size, len(shapes)))) for i in range(0, len(shapes), size)]

  def step() -> None:
    for group in groups:
      optimizer.update(
        group,
        [weights[i] for i in group],
        [grads[i] for i in group],
        [states[i] for i in group],
      )
    mx.nd.waitall()

  serve(step)


if __name__ == "__main__":
  main()
