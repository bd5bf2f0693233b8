"""`draftsmith train`: a speculator from a recipe, with tau measured by decoding."""
def train() -> None:
    """x"""
