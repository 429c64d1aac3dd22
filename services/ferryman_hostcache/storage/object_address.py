"""Opens the object store that a URL names: `s3://bucket/prefix?endpoint=…&region=…`.

Credentials and all options that the URL lacks come from `AWS_*`, as for other tools.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from obstore.exceptions import BaseError
from obstore.store import ObjectStore, S3Store

from ferryman.errors import ConfigError
from ferryman_hostcache.storage.object_blob_store import ObjectBlobStore
from ferryman_hostcache.storage.object_owner import ObjectOwner
from ferryman_hostcache.storage.object_reader import ObjectReader

REQUEST_SECONDS, CONNECT_SECONDS, RETRY_SECONDS = 10.0, 3.0, 10.0
MAX_RETRIES = 3
OPTIONS = ("endpoint", "region")
# In the order in which the client reads them.
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def open_object_store(url: str) -> ObjectBlobStore:
    """Blobs at `url`, owned. Raises ConfigError when the URL, the store or its owner refuse."""
    place, objects = url.partition("?")[0], objects_at(url)
    return ObjectBlobStore(objects, place, ObjectOwner(objects, place))


def folders_beside(url: str) -> Callable[[str], ObjectReader]:
    """Readers of the folders next to the one at `url`, by name."""
    _, bucket, parent, _ = split_url(url)
    place, _, query = url.partition("?")
    objects = _connected(place, bucket, parent, _options(place, query))
    return lambda name: ObjectReader(objects, f"{name}/")


def objects_at(url: str) -> ObjectStore:
    """A client of the store at `url`, with deadlines. Raises ConfigError for a wrong URL."""
    _, bucket, parent, name = split_url(url)
    place, _, query = url.partition("?")
    prefix = f"{parent}/{name}" if parent else name
    return _connected(place, bucket, prefix, _options(place, query))


def split_url(url: str) -> tuple[str, str, str, str]:
    """The endpoint named, the bucket, the prefix of all nodes' folders, and the last part of the
    path: one node's folder. Raises ConfigError."""
    parts = urlsplit(url)
    place = f"{parts.scheme}://{parts.netloc}{parts.path}"
    parent, _, name = parts.path.strip("/").rpartition("/")
    if not parts.netloc or not name:
        raise ConfigError(f"object storage {place}: needs s3://bucket/prefix")
    endpoint = _options(place, parts.query).get("endpoint", "")
    return endpoint, parts.netloc, parent, name


def _options(place: str, query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise ConfigError(f"object storage {place}: unknown option {unknown[0]!r}")
    return options


def _endpoint(options: dict[str, str]) -> str:
    """The endpoint that is used; empty for the one of the region."""
    named = (os.environ.get(name, "") for name in ENDPOINT_VARIABLES)
    return options.get("endpoint") or next(filter(None, named), "")


def _connected(place: str, bucket: str, prefix: str, options: dict[str, str]) -> ObjectStore:
    config: Any = options  # a TypedDict there; the names are checked already
    try:
        return S3Store(
            bucket,
            prefix=prefix or None,
            config=config,
            client_options={
                "allow_http": _endpoint(options).startswith("http://"),
                "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                "timeout": timedelta(seconds=REQUEST_SECONDS),
            },
            retry_config={
                "max_retries": MAX_RETRIES,
                "retry_timeout": timedelta(seconds=RETRY_SECONDS),
            },
        )
    except BaseError as error:
        raise ConfigError(f"object storage {place}: {error}") from error
