"""d"""
def demo() -> None:
    """x"""
