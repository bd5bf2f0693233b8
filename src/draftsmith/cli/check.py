"""`draftsmith check`: does a drafter decode as well as its training promises?"""


def check() -> None:
    """Placeholder."""
