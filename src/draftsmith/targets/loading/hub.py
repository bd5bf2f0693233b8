"""Whether the model hub can be asked at all, so that a slip in a name is answered at once where there is no network."""

import os
import socket
from urllib.parse import urlsplit

from draftsmith.types import DraftsmithError

TIMEOUT_S = 5.0


def check_hub(name: str, what: str) -> None:
    """Refuse a hub name that is not in the local cache where the hub cannot be reached.

    The hub's own client would try again for half a minute first. Behind a proxy nothing is said, since only the client
    knows the way.

    Args:
        what: what the name is to be, such as "target".

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
        return  # the client says what is wrong with the name
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=TIMEOUT_S).close()
    except OSError as error:
        raise DraftsmithError(
            f"the {what} {name!r} is no folder here, and the model hub cannot be reached "
            f"({error.strerror or error}); check the path, or the network."
        ) from error
