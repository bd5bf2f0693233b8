"""Follows a JSON object as it is written, so that it is parsed once, when it is whole, and not with every piece."""

SPACE = frozenset(" \t\r\n")
OUTSIDE = SPACE | frozenset('{}[]:,"+-.0123456789eE') | frozenset("true" "false" "null" "NaN" "Infinity")
"""What stands outside of strings in all that Python's parser reads."""


class JsonObject:
    """Where the text of an object stands: in a string or not, and in how many braces.

    Only a parser says whether the text is JSON; what is told here is what certainly is not.
    """

    def __init__(self) -> None:
        self.depth, self.quoted, self.whole = 0, False, False
        self._escaped = False

    def take(self, character: str) -> bool:
        """Take the next character; return False where no JSON object can have it there."""
        if self._escaped:
            self._escaped = False
        elif self.quoted:
            self._escaped, self.quoted = character == "\\", character != '"'
        else:
            return self._take_outside(character)
        return character >= " "  # a string has no control characters

    def _take_outside(self, character: str) -> bool:
        inside = self.depth > 0 or (character == "{" and not self.whole)
        if character == '"':
            self.quoted = True
        elif character in "{}":
            self.depth += 1 if character == "{" else -1
            self.whole = self.depth <= 0
        return character in (OUTSIDE if inside else SPACE)
