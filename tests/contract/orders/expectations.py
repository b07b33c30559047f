"""Which compositions must be refused, with which words, and which may be.

A refusal is a ValueError in `init` or in the first step that names an order that works. What a
wrapper of ours holds, its `init` sees, whichever the door. A chain of optax's is seen by
`apply_gradients` and the train step, and by a wrapper of ours around it, but not by `tx.init` of
the chain itself.
"""

import dataclasses
import re

from tests.contract.orders import programs

# Wrappers whose params, masters or snapshots must be those after all changes of the updates.
LAST_IN_CHAIN = (
  "master_weights", "master_weights_key", "stochastic_rounding", "average_params"
)  # fmt: skip
# Members of a chain that change the updates of what is before them.
CHANGES_AFTER = ("layerwise_decay", "clip_after")
OURS = (
  "accumulate", "dynamic_loss_scale", *LAST_IN_CHAIN, "freeze_layers", "switch_after", "laperm"
)  # fmt: skip


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


def refusals(order):
  """The refusals that a composition deserves: (the place of the outer wrapper, the words)."""
  kinds = programs.kinds(order)
  found = []
  for i, outer in enumerate(kinds):
    for name, inner in zip(order[i + 1 :], kinds[i + 1 :], strict=True):
      steps_rarely = inner == "multi_steps" or (inner == "accumulate" and programs.EVERY[name] != 1)
      if outer == "freeze_layers" and steps_rarely:
        found.append((i, r"accumulate\(freeze_layers\("))
      if outer == "freeze_layers" and inner in LAST_IN_CHAIN:
        found.append((i, rf"{factory(inner)}\(freeze_layers\("))
      if outer == "switch_after" and inner in (
        "dynamic_loss_scale", "freeze_layers", "average_params"
      ):  # fmt: skip
        found.append((i, rf"{inner}\(switch_after\("))
      if outer == "laperm" and inner == "average_params":
        found.append((i, r"average_params\(laperm\("))
      if outer in CHANGES_AFTER and inner in LAST_IN_CHAIN:
        found.append((i, rf"{factory(inner)}\((optax\.)?chain\("))
      if outer == "clip" and inner == "dynamic_loss_scale":
        found.append((i, r"dynamic_loss_scale\((optax\.)?chain\("))
  return found


def may_be_refused(order, dtype="float32"):
  """Orders that work by chance or that nobody needs: right, or refused."""
  kinds = programs.kinds(order)
  for i, outer in enumerate(kinds):
    for inner in kinds[i + 1 :]:
      # Gradients that are not finite never reach the scale, or stay in the sum before it.
      if outer in ("apply_if_finite", "multi_steps") and inner == "dynamic_loss_scale":
        return True
      # optax's conditional expects updates in the gradients' dtype.
      if outer == "apply_if_finite" and inner in LAST_IN_CHAIN[:3] and dtype != "float32":
        return True
      # The scale is one for the whole loss, says the card.
      if outer in ("masked", "partition") and inner == "dynamic_loss_scale":
        return True
      # Synchronization changes updates after a snapshot, and moves frozen leaves.
      if outer == "lookahead" and inner in ("average_params", "freeze_layers"):
        return True
      # `make_train_step` must find the groups, which a factory hides.
      if outer == "inject_hyperparams" and inner == "freeze_layers":
        return True
      # A window of one micro-step is no accumulation, but its state looks like any other's.
      if outer == "freeze_layers" and inner == "accumulate":
        return True
      # A permutation replaces the updates; masters follow the changed params.
      if outer == "laperm" and inner in LAST_IN_CHAIN:
        return True
      # An identity changes no updates, but its state looks like that of clipping.
      if outer == "identity_after" and inner in LAST_IN_CHAIN:
        return True
      # Its params are pairs, of which few wrappers know.
      if inner == "lookahead" and outer != "average_params":
        return True
  return False


def expected(order, door, dtype="float32"):
  """What must happen to a composition behind a door."""
  deserved = refusals(order)
  if not deserved:
    return Expected(None) if may_be_refused(order, dtype) else RIGHT
  kinds = programs.kinds(order)

  def seen(place):
    in_chain = kinds[place] in (*CHANGES_AFTER, "clip")
    held = any(kind in OURS for kind in kinds[:place])
    return door != "update" or not in_chain or held

  visible = [words for place, words in deserved if seen(place)]
  if visible:
    return Expected(True, (("|".join(visible)),))
  return Expected(None, ())


def verdict(order, door, outcome, detail, dtype="float32"):
  """What came of a run: "right", "refused" as it should be, or what is wrong."""
  wanted = expected(order, door, dtype)
  # Nobody but optax sees `update` of optax's wrapper around ours.
  unseen = door == "update" and order[0] == "apply_if_finite" and wanted.refused is None
  if outcome == "error":
    return "refused" if unseen and "cond branches" in detail else f"raw error: {detail}"
  if outcome == "refused":
    if wanted.refused is False:
      return f"refused, but should work: {detail}"
    if not all(re.search(words, detail) for words in wanted.words):
      return f"refused without the words {wanted.words}: {detail}"
    return "refused"
  if wanted.refused:
    return f"should be refused with the words {wanted.words}, but was {outcome}"
  if outcome == "wrong" and not refusals(order):
    return "; ".join(f"{field}, {what}" for field, what in list(detail.items())[:4])
  return "right"
