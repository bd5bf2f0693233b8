"""The body of a request: bounded in bytes, seconds and depth, then checked field by field."""

import asyncio
import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, ValidationError
from starlette.requests import ClientDisconnect, Request

from draftsmith.serving.errors import ApiError, bad
from draftsmith.serving.settings import Settings

MOST_DEPTH = 128
CLOSED = 499
"""The status that the log has for a client that left; nobody reads it."""


class Fields(BaseModel):
    """A JSON object: kinds are not converted into each other, numbers are finite, fields that nobody knows are left."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


M = TypeVar("M", bound=Fields)
T = TypeVar("T")


class _First(FailFast):
    """pydantic's own cannot stand beside others in a union, for want of a hash."""

    __hash__ = object.__hash__


Several = Annotated[list[T], _First()]
"""A list whose first mistake is its last: a body of some megabytes can hold a million of them."""
Flag = Annotated[bool, BeforeValidator(lambda given: given is not None and given)]
"""Off where it is null, as where it is left out."""


async def read_fields(request: Request, kind: type[M], settings: Settings) -> M:
    """Return the checked body of a request.

    Raises:
        ApiError: 400 for what is no such object, 408 for one that does not come, 413 for one that is too large, and 415
            for what does not say that it is JSON: pages of other sites may send everything else without being asked.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body has to be JSON; send it with the header content-type: application/json.")
    value = parse(await read_bytes(request, settings))
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise in_one_sentence(error) from error


async def read_bytes(request: Request, settings: Settings) -> bytes:
    """Return the body as it came."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > settings.max_body_bytes:
        raise _too_large(settings)
    pieces, size = [], 0
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for piece in request.stream():
                size += len(piece)
                if size > settings.max_body_bytes:
                    raise _too_large(settings)
                pieces.append(piece)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {settings.body_seconds:g} seconds.") from None
    except ClientDisconnect:
        raise ApiError(CLOSED, "the client left before the whole body had come.") from None
    return b"".join(pieces)


def parse(body: bytes) -> Any:
    """Return what a JSON text says; ApiError for anything else, and for what is nested too deeply."""
    try:
        value = json.loads(body, parse_constant=_refuse)
    except RecursionError:
        raise _too_deep() from None
    except (ValueError, UnicodeDecodeError) as error:
        raise bad(f"the body is not JSON ({error}).") from None
    _check_depth(value)
    return value


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no number")


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MOST_DEPTH):
        level = [
            inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ApiError:
    return bad(f"the body is nested more than {MOST_DEPTH} deep; make it flatter.")


def _too_large(settings: Settings) -> ApiError:
    return ApiError(413, f"the body has more than {settings.max_body_bytes} bytes; send less.")


def in_one_sentence(error: ValidationError) -> ApiError:
    """Return the first mistake of a body."""
    # Of alternatives, what went farthest into the value says most.
    first = max(error.errors(include_url=False, include_input=False), key=lambda one: len(one["loc"]))
    place = ".".join(str(part) for part in first["loc"] if _is_name(part))
    where = f"{place}: " if place else "the body: "
    return bad(f"{where}{first['msg']}.", param=place.split(".")[0] or None)


def _is_name(part: int | str) -> bool:
    """Whether a part of a place is a field or a number, and not the name of one of several kinds."""
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "int", "float", "bool"))
