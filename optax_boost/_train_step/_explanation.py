"""Says for each leaf of the params whether its gradient exists as a whole, and why."""

from collections.abc import Sequence

import jax
import optax

from optax_boost._foundation import _paths
from optax_boost._step import _addition, _slots
from optax_boost._trace import _leaf_scans
from optax_boost._train_step import _traced_loss


def explain(
  step: _slots.Step | None,
  params: optax.Params,
  traced: _traced_loss.TracedLoss,
  frozen: Sequence[_leaf_scans.Frozen],
  addition: _addition.Addition | None,
  update_in_backward: bool,
) -> dict[str, str]:
  """Returns a sentence for each leaf, by its path.

  `frozen` is :meth:`Objective.frozen`; the other arguments are those of a step.
  """
  leaves = jax.tree.leaves(params)
  if update_in_backward:
    by_layer = "updated in the backward pass, layer by layer"
    whole = "updated after the backward pass"
  elif addition is not None:
    by_layer = "added to its window in the backward pass, layer by layer"
    whole = "added to its window as a whole"
  else:
    reason = "the optimizer's step is made after the backward pass (`update_in_backward`)"
    if step is not None and step.accumulation is not None:
      reason = "its window takes a micro-batch only after judging it (`not_finite`)"
    return dict.fromkeys(_paths.leaf_paths(params), f"exists as a whole: {reason}")
  once = update_in_backward or (addition is not None and addition.measures)
  uses = _leaf_scans.find_uses(traced.program, len(leaves))
  obstacles = uses.find_obstacles(frozen[: len(leaves)], once)
  texts = [f"{whole}, since {obstacle}" if obstacle else by_layer for obstacle in obstacles]
  return dict(zip(_paths.leaf_paths(params), texts, strict=True))
