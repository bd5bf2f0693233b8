"""The one place that decides what form an answer must have and what it is predicted to be.

Everything else of the server hands a request over here and passes on what it gets back.
"""

from draftsmith.serving.errors import bad
from draftsmith.serving.openai_fields import ChatFields, Generation


def check_form(fields: Generation) -> None:
    """Refuse what asks for a form of the answer or predicts it."""
    if fields.response_format is not None and fields.response_format.type != "text":
        raise bad("response_format is not served yet; leave it out, or ask for text.", "response_format")
    if fields.structured_outputs is not None:
        raise bad("structured_outputs is not served yet; leave it out.", "structured_outputs")
    if fields.prediction is not None:
        raise bad("prediction is not served yet; leave it out.", "prediction")
    if isinstance(fields, ChatFields) and fields.tools and fields.tool_choice != "none":
        raise bad('tools are not served yet; leave them out, or set tool_choice to "none".', "tools")
