"""Reads objects by ranges, from any owner; the errno of each failure and what to do about it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore

REQUEST_BYTES = 8 << 20  # of one ranged read, so that each ends within a request's deadline
# phrases of the library's errors; a full store answers with 507, or with 403 and its reason
SAID = (
    ("status code: 507", errno.ENOSPC),
    ("<Code>QuotaExceeded</Code>", errno.ENOSPC),
    ("status code: 403", errno.EACCES),
    ("status code: 401", errno.EACCES),
)
# The first phrase that an error holds says what it is about.
ADVICE = (
    (
        "/latest/",  # it asks the machine's own service for them
        "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the"
        " machine a role",
    ),
    ("<Code>NoSuchBucket</Code>", "there is no such bucket: make it first"),
    (
        "status code: 403",
        "it refuses these credentials (AWS_*): they need GetObject, PutObject, DeleteObject and"
        " ListBucket there",
    ),
    ("status code: 401", "it does not know these credentials (AWS_*)"),
    (
        "kind: Connect",
        "it cannot be reached: see its endpoint (?endpoint=… or AWS_ENDPOINT_URL) and region",
    ),
    ("kind: Timeout", "it does not answer in time"),
)


class ObjectReader:
    """A `BlobReader` of the objects whose names begin with `folder`."""

    def __init__(self, objects: ObjectStore, folder: str = "") -> None:
        self._objects, self._folder = objects, folder

    def read(self, name: str, begin: int, into: memoryview) -> int:
        done = 0
        while done < len(into):
            wanted = min(REQUEST_BYTES, len(into) - done)
            content = self._range(self._folder + name, begin + done, wanted)
            into[done : done + len(content)] = content
            done += len(content)
            if len(content) < wanted:
                break
        return done

    def _range(self, name: str, begin: int, num_bytes: int) -> memoryview:
        """The bytes of a range, fewer at the object's end."""
        with os_errors():
            try:
                return memoryview(
                    obstore.get_range(self._objects, name, start=begin, length=num_bytes)
                )
            except BaseError:
                # A range that begins after the end is refused like one that failed.
                if begin < obstore.head(self._objects, name)["size"]:
                    raise
                return memoryview(b"")


@contextmanager
def os_errors() -> Iterator[None]:
    """Gives the library's errors the errno that a `BlobStore` must report."""
    try:
        yield
    except OSError as error:
        if error.errno:
            raise
        number = _number_of(error)
        raise OSError(number, os.strerror(number)) from error
    except BaseError as error:
        message = str(error).partition("\n")[0]
        raise OSError(_number_said(message), message) from error


def explained(error: Exception) -> str:
    """The first line of the library's error, after the advice for the operator."""
    whole = str(error)
    first = whole.partition("\n")[0]
    advice = (words for phrase, words in ADVICE if phrase in whole)
    return f"{words} ({first})" if (words := next(advice, "")) else first


def _number_said(message: str) -> int:
    """The errno of an answer that the library has no built-in error for."""
    numbers = (number for phrase, number in SAID if phrase in message)
    return next(numbers, errno.EIO)


def _number_of(error: OSError) -> int:
    if isinstance(error, FileNotFoundError):
        return errno.ENOENT
    return errno.EACCES if isinstance(error, PermissionError) else errno.EIO
