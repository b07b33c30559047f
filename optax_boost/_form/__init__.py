"""Makes every transformation: how it describes itself, and how its arguments are checked.

The modules, each of which imports those before it:

  _protocol         what the class of a state declares: metrics, requests to the train step, ...
  _skipped_steps    tells from two states whether a call made a step, or left its batch out
  _finiteness       ``finite_entries`` defines which entries of a tree are finite; checks of trees
  _state_check      refuses the state of other params or of another transformation
  _form             ``Form``: a transformation's name and arguments
  _transformation   makes transformations from the functions of a method
"""
