"""Reads objects by ranges, whoever owns them; and the errno of each failure."""

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


class ObjectReader:
    """A `BlobReader` of the objects whose names begin with `folder`."""

    def __init__(self, objects: ObjectStore, folder: str = "") -> None:
        self._objects, self._folder = objects, folder

    def read(self, name: str, begin: int, into: memoryview) -> int:
        done = 0
        while done < len(into):
            wanted = min(REQUEST_BYTES, len(into) - done)
            found = self._range(self._folder + name, begin + done, wanted)
            into[done : done + len(found)] = found
            done += len(found)
            if len(found) < wanted:
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
                # A range that begins behind the end is refused, as one that failed is.
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
        said = str(error).partition("\n")[0]
        raise OSError(_number_said(said), said) from error


def _number_said(said: str) -> int:
    """The errno of an answer that the library has no built-in error for."""
    numbers = (number for phrase, number in SAID if phrase in said)
    return next(numbers, errno.EIO)


def _number_of(error: OSError) -> int:
    if isinstance(error, FileNotFoundError):
        return errno.ENOENT
    return errno.EACCES if isinstance(error, PermissionError) else errno.EIO
