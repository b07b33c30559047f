"""Compositions that are known to be wrong, which the tests expect to fail.

One that passes fails its test, so that the lists shrink with the mending.
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
