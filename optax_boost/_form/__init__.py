"""How every transformation is made: how it describes itself, and how its steps are run and checked.

The modules, each of which imports those before it:

  _protocol         what the type of a state declares: metrics, requests, its outcome, exact params
  _skipped_steps    tells from two states whether a call made a step, or left its batch out
  _finiteness       the rule of finiteness: ``finite_entries`` defines which entries of gradients,
                    params and states are finite
  _state_check      refuses the state of other params or of another transformation
  _form             ``Form``: a description of a transformation: its name, its arguments, the
                    transformations that it holds
  _compositions     the transformations inside a transformation, of this package, of optax and of
                    users
  _order            checks, in ``init``, two rules for the order of wrappers
  _exact_params     adds updates to params, or takes the exact params that a state holds
  _driver           makes or skips the steps of wrappers, and returns updates or applies them
  _transformation   makes every transformation, from the functions of a method or of a wrapper
  _apply_gradients  ``apply_gradients``: update and ``optax.apply_updates`` in one call
"""
