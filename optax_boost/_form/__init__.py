"""The one form of a transformation: what it says of itself, what drives and what checks a step."""
