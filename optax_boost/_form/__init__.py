"""Makes every transformation: how it describes itself, and how its steps are run and checked.

The modules, each of which imports those before it:

  _protocol         what the class of a state declares: metrics, requests to the train step, ...
  _skipped_steps    tells from two states whether a call made a step, or left its batch out
  _finiteness       ``finite_entries`` defines which entries of a tree are finite; checks of trees
  _state_check      refuses the state of other params or of another transformation
  _form             ``Form``: a transformation's name, arguments, and held transformations
  _compositions     finds and replaces the transformations that a transformation holds
  _order            refuses, in ``init``, wrappers in a wrong order
  _exact_params     adds updates to params, or takes the exact params that a state holds
  _driver           makes or skips the steps of wrappers, and returns updates or applies them
  _transformation   makes transformations from the functions of a method or of a wrapper
  _apply_gradients  ``apply_gradients``: update and ``optax.apply_updates`` in one call
"""
