"""The one style of this package's errors."""


class BadBatchError(ValueError):
    """A rank could not prepare its part of the step; raised on every rank, naming the rank and its reason."""


def explain(given: str, rule: str, remedy: str) -> str:
    """An error text: what was given, the rule it breaks, what to do."""
    return f"{given}: {rule}. {remedy}."
