"""Decides whether a failing chat template itself is at fault, or the messages it was given."""

from draftsmith.targets.loading.tokens import first_line
from draftsmith.types import DraftsmithError


def template_fault(error: Exception, name: str, prompt: str) -> DraftsmithError:
    """Return the error to raise for an exception that came out of a chat template.

    Args:
        name: of the target.
        prompt: what to call the messages, such as "prompt 0".
    """
    from jinja2 import TemplateSyntaxError, UndefinedError

    reason = first_line(error)
    if isinstance(error, TemplateSyntaxError | UndefinedError):
        where = f" at {prompt}" if isinstance(error, UndefinedError) else ""
        return DraftsmithError(
            f"the chat template of {name} is broken ({reason}{where}); correct it in its chat_template.jinja or "
            "tokenizer_config.json, or give text instead of messages."
        )
    return DraftsmithError(f"the chat template of {name} refuses {prompt} ({reason}); fix its messages.")
