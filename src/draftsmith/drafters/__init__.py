"""Draft families: everything that guesses ahead of a target."""
