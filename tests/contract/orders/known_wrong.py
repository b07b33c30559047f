"""Compositions that are known to be wrong, which the tests expect to fail.

One that passes fails its test, so that the lists shrink with the mending.
"""


def orders(text):
  return frozenset(tuple(line.strip().split(" > ")) for line in text.strip().splitlines())


# The params of `laperm` that are not finite return to the last permutation in whichever step, if
# it is made in place.
IN_FLOAT32 = orders("""
  laperm > multi_steps
  multi_steps > laperm
""")

IN_BFLOAT16 = orders("""
""")

# Around an optimizer that makes NaN of ordinary gradients.
POISONED = orders("""
""")
