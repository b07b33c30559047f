"""Compositions that are known to be wrong, which the tests expect to fail.

A test of one of these that passes fails, so that the list shrinks with the mending.
"""


def orders(text):
  return frozenset(tuple(line.strip().split(" > ")) for line in text.strip().splitlines())


IN_FLOAT32 = orders("""
""")

IN_BFLOAT16 = orders("""
""")

# Around an optimizer that makes NaN of ordinary gradients.
POISONED = orders("""
""")

# Fields that are wrong in whichever composition; the orders are compared without them.
FIELDS = ("MasterWeightsState.count", "StochasticRoundingState.count")

# `dynamic_loss_scale` around such an optimizer counts nothing.
SCALE_IS_SILENT = True

# The doors that let `optax.chain(svrg(...), dynamic_loss_scale(...))` in.
SVRG_BEFORE_A_SCALE = ("apply_gradients",)
