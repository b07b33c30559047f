"""Races: several transformations train the same problem, and are compared at equal budgets.

The modules, each of which imports those before it:

  _plot             the picture of a race
  _result           ``RaceResult``: curves, and their comparison at equal steps, gradients and time
  _averaged_params  reads the averages of params and statistics in an optimizer's state
  _training         counts gradients, then trains all seeds with all methods in turns, on the clock
  _race             ``race``: checks the arguments, and makes the batches of each seed
"""

from optax_boost._race._race import race as race
from optax_boost._race._result import RaceResult as RaceResult
