"""Folders of a bucket as owners in the index: units that a node has stored outlive the node.

    s3://bucket/parent/NAME     the folder of one node; the others next to it are those it can read

A folder is an owner as a node is. Its epoch is the term of the host-cache that owns it, so what a
former owner announced is void once the next one has claimed the folder. Its record lasts a day: the
entries stand while the node is away. It has no address, because no process answers for it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ferryman.errors import InvalidRequest
from ferryman.wire.nats.subjects import MAX_NAME_LEN
from ferryman.wire.redis.index import NodeLife, NodePrefix

CLAIM_SECONDS = 86_400.0  # as long as entries of the index last

_TAG_DIGITS = 16
_ID = re.compile(rf"folder-([0-9a-f]{{{_TAG_DIGITS}}})-[a-z0-9_-]+")
MAX_SHORT_LEN = MAX_NAME_LEN - len("folder--") - _TAG_DIGITS
_SHORT = re.compile(rf"[a-z0-9_-]{{1,{MAX_SHORT_LEN}}}")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,252}")


@dataclass(frozen=True, slots=True)
class BucketFolder:
    """One node's folder: the last part of its path, such as a host's name. `bucket` has 16
    hexadecimal digits: a tag of the place, under the cluster's key, so that the index does not show
    the place. Raises InvalidRequest for a name that is no host's."""

    bucket: str
    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidRequest(
                f"folder {self.name[:MAX_NAME_LEN]!r} of a bucket must be 1 to 253 of A-Z, a-z, "
                "0-9, '.', '_' and '-', and not begin with '.'",
                "folder",
            )

    @property
    def node_id(self) -> str:
        """Its name in the index: a hash stands for a long or dotted one."""
        digest = hashlib.blake2s(self.name.encode(), digest_size=16).hexdigest()
        return f"folder-{self.bucket}-{self.name if _SHORT.fullmatch(self.name) else digest}"

    def life(self, term: int) -> NodeLife:
        """The folder in this term as an owner in the index, with its whole name."""
        return NodeLife(self.node_id, term, folder=self.name)


def bucket_of_folder(node_id: str) -> str:
    """The bucket's tag in a folder's id; empty for a node's id."""
    match = _ID.fullmatch(node_id)
    return match[1] if match else ""


def folders_beside(folder_id: str, prefixes: Iterable[NodePrefix]) -> list[NodePrefix]:
    """The other folders in the bucket of the folder `folder_id`, the deepest prefix first."""
    bucket = bucket_of_folder(folder_id)
    others = [
        prefix
        for prefix in prefixes
        if bucket
        and bucket_of_folder(prefix.node.node_id) == bucket
        and prefix.node.node_id != folder_id
    ]
    return sorted(others, key=lambda prefix: (-prefix.usable_pages, prefix.node.node_id))


def with_shared(
    prefixes: Mapping[str, NodePrefix], living: Iterable[NodeLife]
) -> dict[str, NodePrefix]:
    """Adds `shared_pages`: for every living node that owns a folder, how much of the chain another
    folder of that bucket has. One folder counts alone, because a tier's full pages are closed under
    prefixes: of two folders the deeper one has them all."""
    result = dict(prefixes)
    if not any(bucket_of_folder(node_id) for node_id in prefixes):
        return result
    for node in living:
        if others := folders_beside(node.folder, prefixes.values()):
            mine = prefixes.get(node.node_id, NodePrefix(node, 0, 0))
            result[node.node_id] = replace(mine, shared_pages=others[0].usable_pages)
    return result
