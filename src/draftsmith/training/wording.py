"""Numbers with the nouns that they count."""


def counted(count: float, noun: str) -> str:
    """Return "1 step", "1,200 steps", "0.5 minutes": a noun that takes an s, singular where the number shown is 1."""
    shown = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{shown} {noun}{'' if shown == '1' else 's'}"
