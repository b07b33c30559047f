"""The table that AutoBoost explains itself with."""


def rows_of(boost):
  """The rows of the table by method, each with the line that tells its effect."""
  text = boost.explain().replace("\n" + 28 * " " + "here: ", " | ")
  return {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines()[1:]}
