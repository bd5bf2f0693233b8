"""Checks whether the model hub can be reached, so that without a network a mistyped name is reported at once."""

import os
import socket
from urllib.parse import urlsplit

from draftsmith.types import DraftsmithError

TIMEOUT_S = 5.0


def check_hub(name: str, what: str) -> None:
    """Refuse a hub name that is not in the local cache if the hub cannot be reached.

    The hub's own client would first retry for half a minute. Behind a proxy nothing is checked, since only the client
    knows the way.

    Args:
        what: what the name stands for, such as "target".

    Raises:
        DraftsmithError: the hub does not answer.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if constants.HF_HUB_OFFLINE or any(key.lower().endswith("_proxy") for key in os.environ if os.environ[key]):
        return
    try:
        if try_to_load_from_cache(name, "config.json") is not None:
            return
    except HFValidationError:
        return  # the client reports what is wrong with the name
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=TIMEOUT_S).close()
    except OSError as error:
        raise DraftsmithError(
            f"the {what} {name!r} is no folder here, and the model hub cannot be reached "
            f"({error.strerror or error}); check the path, or the network."
        ) from error
