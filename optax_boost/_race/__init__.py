"""Races of transformations: counting, timing, comparison, pictures."""

from optax_boost._race._race import race as race
from optax_boost._race._result import RaceResult as RaceResult
