"""Which compositions must be refused, with which words, and which may be.

A refusal is a ValueError in `init` that names an order that works, or says why none does, behind
every door.
"""

import dataclasses
import re

from tests.contract import registry
from tests.contract.orders import programs

# What looks at the params after the step, or computes them: it must see all changes of updates.
ROUNDS = ("master_weights", "master_weights_key", "stochastic_rounding")
KEEPS = (*ROUNDS, "average_params")
CHAINS = ("clip", "clip_after", "identity_after")
# What the driver of wrappers calls, so that changes of updates reach what it holds.
ON_DRIVER = (*KEEPS, *registry.on_the_driver())
WRAPPERS = (*ON_DRIVER, *registry.holders())


@dataclasses.dataclass(frozen=True)
class Expected:
  """What must happen to a composition.

  Attributes:
    refused: True: it must be refused; False: it must be right; None: one of the two.
    words: regular expressions that the message of a refusal must match.
  """

  refused: bool | None
  words: tuple[str, ...] = ()


RIGHT = Expected(False)


def factory(kind):
  return kind.removesuffix("_key")


def refusals(order, dtype="float32"):
  """The words of the refusals that a composition deserves."""
  kinds = programs.kinds(order)
  found = []
  for i, outer in enumerate(kinds):
    if outer in CHAINS:
      ours = [kind for kind in kinds[i + 1 :] if kind in WRAPPERS]
      if ours:
        found.append(rf"{factory(ours[0])}\((optax\.)?chain\(")
    for k, inner in enumerate(kinds[i + 1 :], i + 1):
      if outer == "switch_after" and inner in (
        "dynamic_loss_scale", "freeze_layers", "average_params"
      ):  # fmt: skip
        found.append(rf"{inner}\(switch_after\(")
      if outer in ("laperm", "lookahead") and inner == "average_params":
        found.append(rf"average_params\((optax\.)?{outer}\(")
      if outer == "layerwise_decay" and inner == "laperm":
        found.append("permutes params")
      is_hidden = not set(kinds[i + 1 : k]) <= set(ON_DRIVER)
      if outer in ("layerwise_decay", "freeze_layers") and inner in KEEPS and is_hidden:
        found.append(rf"{factory(inner)}\({outer}\(")
      if dtype != "float32" and inner in ROUNDS:
        # The optimizer in a loss scale has float32 params.
        if outer == "apply_if_finite" and "dynamic_loss_scale" not in kinds[:i]:
          found.append(rf"{factory(inner)}\(optax.apply_if_finite\(")
        if outer == "dynamic_loss_scale" and is_hidden:
          found.append(rf"{factory(inner)}\({outer}\(")
  return found


def may_be_refused(order):
  """Orders that work by chance or that nobody needs: right, or refused."""
  kinds = programs.kinds(order)
  for i, outer in enumerate(kinds):
    for inner in kinds[i + 1 :]:
      # Gradients that are not finite never reach the scale, or stay in the sum before it.
      if outer in ("apply_if_finite", "multi_steps") and inner == "dynamic_loss_scale":
        return True
      # The scale is one for the whole loss, says the card.
      if outer in ("masked", "partition") and inner == "dynamic_loss_scale":
        return True
      # Synchronization moves frozen leaves.
      if outer == "lookahead" and inner == "freeze_layers":
        return True
      # `make_train_step` must find the groups, which a factory hides.
      if outer == "inject_hyperparams" and inner == "freeze_layers":
        return True
      # A permutation replaces the updates; masters follow the changed params.
      if outer == "laperm" and inner in ROUNDS:
        return True
      # Its params are pairs, of which few wrappers know.
      if inner == "lookahead" and outer != "average_params":
        return True
  return False


def expected(order, dtype="float32"):
  """What must happen to a composition."""
  deserved = refusals(order, dtype)
  if deserved:
    return Expected(True, ("|".join(deserved),))
  return Expected(None) if may_be_refused(order) else RIGHT


def verdict(order, outcome, detail, dtype="float32"):
  """What came of a run: "right", "refused" as it should be, or what is wrong."""
  wanted = expected(order, dtype)
  if outcome == "error":
    return f"raw error: {detail}"
  if outcome == "refused":
    if wanted.refused is False:
      return f"refused, but should work: {detail}"
    if not all(re.search(words, detail) for words in wanted.words):
      return f"refused without the words {wanted.words}: {detail}"
    return "refused"
  if wanted.refused:
    return f"should be refused with the words {wanted.words}, but was {outcome}"
  if outcome == "wrong":
    return "; ".join(f"{field}, {what}" for field, what in list(detail.items())[:4])
  return "right"
