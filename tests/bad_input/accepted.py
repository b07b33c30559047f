"""What is accepted on purpose, by callable, argument and label, with the reason."""

_OBSERVES = "it hands gradients on as they are; the optimizer behind it decides what it takes"
_STATELESS = "it has no state and looks at none"
_ANY_TREE = "it maps over the gradients alone; params only name the leaves' axes"
_INNER = "params and gradients are handed to the inner optimizer, which decides what it takes"

ON_PURPOSE: dict[tuple[str, str, str], str] = {
  ("freeze", "updates", "integers"): _OBSERVES,
  ("freeze", "updates", "bools"): _OBSERVES,
  ("record_trajectory", "updates", "integers"): _OBSERVES,
  ("record_trajectory", "updates", "bools"): _OBSERVES,
  **{
    ("centralize", argument, label): _ANY_TREE
    for argument in ("updates", "params")
    for label in ("other tree", "leaf missing", "other shape")
  },
  **{
    ("centralize", "state", label): _STATELESS
    for label in ("None", "empty", "number", "params", "Adam's", "the state's fields")
  },
  **{
    ("switch_after", argument, label): _INNER
    for argument in ("updates", "params")
    for label in ("other tree", "leaf missing", "other shape")
  },
  **{
    ("accumulate", "params", label): _INNER
    for label in ("other tree", "leaf missing", "other shape")
  },
}
