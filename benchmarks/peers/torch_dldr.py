"""One DLDR step in PyTorch, all in memory: ``torch_dldr.py COMPONENTS SHAPES_JSON``.

Built as the method's authors build it: vectors of all params, a basis that is one matrix, pseudo
gradients that an SGD optimizer applies for each trial and for the step. Theirs writes the weights
to a file before the search, and reads them back after each trial; this one copies them.
"""

import json
import sys

from serve import serve
import torch

_RHO, _SIGMA, _GAMMA, _ALPHA = 0.55, 0.4, 0.9, 1e-3


class Step:
  """Weights, gradients and the state of the method."""

  def __init__(self, k, shapes):
    torch.manual_seed(0)
    self.params = [torch.nn.Parameter(0.05 * torch.randn(s)) for s in shapes]
    self.grads = [0.01 * torch.randn(s) for s in shapes]
    self.optimizer = torch.optim.SGD(self.params, lr=1.0)
    size = sum(p.numel() for p in self.params)
    self.basis = torch.randn(k, size) / size**0.5
    self.inverse_hessian = torch.eye(k)
    self.last_step = torch.zeros(k, 1)
    self.last_gradient = torch.zeros(k, 1)
    self.momentum = torch.zeros(size)

  def move(self, vector):
    """Takes a vector from the params, through the optimizer."""
    start = 0
    for p in self.params:
      p.grad = vector[start : start + p.numel()].view_as(p)
      start += p.numel()
    self.optimizer.step()

  def lift(self, coefficients):
    """From the subspace to a vector of all params."""
    return torch.mm(self.basis.T, coefficients).view(-1)

  def loss(self):
    """Costs next to nothing, and accepts every trial."""
    return float(self.params[0].view(-1)[0]) * 0 - 1.0

  def __call__(self):
    """Makes one step."""
    gradient = torch.cat([g.view(-1) for g in self.grads])
    projected = torch.mm(self.basis, gradient.view(-1, 1))
    residual = gradient - self.lift(projected)
    change = projected - self.last_gradient
    curvature = float(change.T @ self.last_step)
    if curvature > 1e-20:
      t = torch.eye(len(change)) - change @ self.last_step.T / curvature
      outer = self.last_step @ self.last_step.T / curvature
      self.inverse_hessian = t.T @ self.inverse_hessian @ t + outer
    self.last_gradient = projected
    step = -self.inverse_hessian @ projected
    descent = float(projected.T @ step)
    saved = [p.clone() for p in self.params]
    for _ in range(2):
      self.move(self.lift(-step))
      loss = self.loss()
      for p, old in zip(self.params, saved, strict=True):
        p.copy_(old)
      if loss < 0.0 + _SIGMA * descent:
        break
      step, descent = _RHO * step, _RHO * descent
    self.last_step = step
    self.momentum.mul_(_GAMMA).add_(residual)
    self.move(self.lift(-step) + _ALPHA * self.momentum)


def main() -> None:
  with torch.no_grad():
    serve(Step(int(sys.argv[1]), json.loads(sys.argv[2])))


if __name__ == "__main__":
  main()
