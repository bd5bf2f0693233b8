"""The body of a request: bounded in bytes, seconds and depth, then checked field by field."""

import asyncio
import gc
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import ClientDisconnect, Request

from draftsmith.serving.errors import ApiError, bad
from draftsmith.serving.settings import Settings
from draftsmith.serving.thread import BoundedThread

_NAMED_CLASS = re.compile(r"a valid dictionary or instance of \w+")
"""What pydantic calls a JSON object, in which a class of ours means nothing to a client."""
MOST_DEPTH = 128
THROWN_AWAY_S, THROWN_AWAY_BYTES = 2.0, 1 << 26
"""For so long, and so much, of a body that is too large is read and thrown away."""
SMALL_BYTES = 1 << 16
"""A body of at most so many bytes is read sooner than another thread takes it over."""
SHOWN = 40
"""So many characters of a wrong value are sent back."""
CLOSED = 499
"""The status that the log and the metrics have for a client that left, which no longer reads it."""


class Fields(BaseModel):
    """A JSON object: types are not converted into each other, numbers are finite, and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class KnownFields(Fields):
    """A JSON object of our own alone: no client of another server sends it, so an unknown field in it is a mistake."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, given: Any) -> Any:
        names = given if isinstance(given, dict) else ()
        unknown = next((name for name in names if name not in cls.model_fields), None)
        if unknown is not None:
            *others, last = cls.model_fields
            known = f"{', '.join(others)} and {last}"
            raise PydanticCustomError(
                "unknown_field", "there is no field {unknown} in it; the fields are {known}",
                {"unknown": repr(unknown[:40]), "known": known},
            )
        return given


M = TypeVar("M", bound=Fields)
T = TypeVar("T")


class _First(FailFast):
    """FailFast with a hash; pydantic's own has none, so it cannot be part of a union."""

    __hash__ = object.__hash__


Several = Annotated[list[T], _First()]
"""A list that is checked only up to its first mistake: a body of some megabytes can hold a million of them."""
Flag = Annotated[bool, BeforeValidator(lambda given: given is not None and given)]
"""A boolean for which null means false, as if it were left out."""


class Bodies:
    """Reads the bodies of requests: large ones in a thread of its own, so that they hold up other requests for less.

    They still do for a while: `json.loads` holds the interpreter's lock from its beginning to its end, 60 to 90 ms for
    4 MB of small parts. What is gained is that no garbage is collected meanwhile, and that the fields and the depth are
    checked elsewhere than in the event loop. One body at a time, because garbage collection is a matter of the whole
    process, and pauses.

    Args:
        most: large bodies that may wait or be read at once; further ones are refused (429).
    """

    def __init__(self, settings: Settings, most: int) -> None:
        self._settings = settings
        self._thread = BoundedThread("draftsmith-bodies", most, "large bodies wait to be read")

    async def read(self, request: Request, kind: type[M]) -> M:
        """Return the checked body of a request.

        Raises:
            ApiError: 400 for a body that does not fit `kind`, 408 for one that does not come in time, 413 for one that
                is too large, 429 for a large one where too many wait, 499 where the client left, and 415 for one
                that is not declared as JSON: browsers send some other types for pages of other sites without asking the
                server first.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the body has to be JSON; send it with the header content-type: application/json.")
        body = await read_bytes(request, self._settings)
        if len(body) <= SMALL_BYTES:
            return checked(body, kind)

        def read() -> M:
            with no_collection():
                return checked(body, kind)

        return await self._thread.run(read)

    def close(self) -> None:
        """End the thread after the body that it reads now; those that wait are not read."""
        self._thread.close()


@contextmanager
def no_collection() -> Iterator[None]:
    """Look for no garbage: the million lists that some megabytes can hold are all in use, and it is sought among them
    again and again, which takes ten times as long as reading them and stops all threads."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def checked(body: bytes, kind: type[M]) -> M:
    """Return a body as the fields of `kind`; ApiError 400 where it does not fit."""
    try:
        return kind.model_validate(parse(body))
    except ValidationError as error:
        raise in_one_sentence(error) from error


async def read_bytes(request: Request, settings: Settings) -> bytes:
    """Return the body as it came."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > settings.max_body_bytes:
        if "expect" not in request.headers:
            await _throw_away(request)
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


async def _throw_away(request: Request) -> None:
    """Read what a client is sending in any case, for a moment: closed before, the connection would break its answer."""
    size = 0
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(THROWN_AWAY_S):
            async for piece in request.stream():
                size += len(piece)
                if size > THROWN_AWAY_BYTES:
                    return


def parse(body: bytes) -> Any:
    """Return the value of a JSON text; ApiError for anything else, and for a value that is nested too deeply."""
    try:
        value = json.loads(body, parse_constant=_refuse)
    except RecursionError:
        raise _too_deep() from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise bad(f"the body is not JSON ({error}).") from None
    except ValueError:  # Python refuses to read whole numbers of thousands of digits
        raise bad("the body has a whole number with too many digits; shorten it.") from None
    _check_depth(value)
    return value


def _refuse(word: str) -> Any:
    raise bad(f"the body is not JSON ({word} is no number).")


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
    """Return one mistake of a body: the one deepest in it, the first of several."""
    # Where a union has alternatives, the mistake that is deepest in the value says most.
    first = max(error.errors(include_url=False), key=lambda one: len(one["loc"]))
    said = _NAMED_CLASS.sub("a JSON object", first["msg"])
    place = ".".join(str(part) for part in first["loc"] if _is_name(part))
    where = f"{place}: " if place else "the body: "
    # Sentences of ours say what is wrong with a value; those of pydantic say what it should be.
    given = first["input"] if first["msg"].startswith("Input should be") else None
    shown = given[:SHOWN] if isinstance(given, str) else given
    told = f", and not {json.dumps(shown)[:SHOWN]}" if isinstance(shown, str | int | float) else ""
    return bad(f"{where}{said}{told}.", param=place.split(".")[0] or None)


def _is_name(part: int | str) -> bool:
    """Whether a part of a location is a field or an index, and not the name of an alternative of a union."""
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "int", "float", "bool"))
