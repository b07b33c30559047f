"""Racing transformations against each other: the front, the training, its cost, the findings."""

from optax_boost._race._api import check_optional_callable
from optax_boost._race._api import race
from optax_boost._race._api import race_from
from optax_boost._race._result import RaceCurves
from optax_boost._race._result import RaceResult

__all__ = ["RaceCurves", "RaceResult", "check_optional_callable", "race", "race_from"]
