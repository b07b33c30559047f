"""Races of transformations: counting, timing, comparison, pictures.

The modules, each of which imports those before it:

  _plot       the picture of a race
  _result     curves, compared at equal steps, gradient evaluations and time
  _evaluated  the params and statistics that a method would be evaluated at
  _run        the training: counted once, then on the clock, then with the other seeds
  _race       ``race``, its arguments and its batches
"""

from optax_boost._race._race import race as race
from optax_boost._race._result import RaceResult as RaceResult
