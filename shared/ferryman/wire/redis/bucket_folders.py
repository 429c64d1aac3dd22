"""Folders of a bucket as owners in the index: units that a node has stored outlive the node.

    s3://bucket/parent/NAME     the folder of one node; the others beside it are those it can read

A folder is an owner as a node is. Its epoch is the term of the host-cache that owns it, so what a
former owner announced is void once the next one has claimed the folder. Its record lasts a day: the
entries stand while the node is away. It has no address, because nobody answers for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ferryman.wire.nats.subjects import MAX_NAME_LEN, check_name
from ferryman.wire.redis.index import NodeLife, NodePrefix

CLAIM_SECONDS = 86_400.0  # as long as entries of the index last

_TAG_DIGITS = 16
_ID = re.compile(rf"folder-([0-9a-f]{{{_TAG_DIGITS}}})-([a-z0-9][a-z0-9_-]*)")
MAX_FOLDER_LEN = MAX_NAME_LEN - len("folder--") - _TAG_DIGITS


@dataclass(frozen=True, slots=True)
class BucketFolder:
    """One node's folder. `bucket` has 16 hexadecimal digits: a tag of the place, under the
    cluster's key, so that the index does not show the place. Raises InvalidRequest for a name that
    the index cannot hold."""

    bucket: str
    name: str

    def __post_init__(self) -> None:
        check_name(self.name, "folder of a bucket")
        check_name(self.node_id, "folder of a bucket, with the bucket's tag,")

    @property
    def node_id(self) -> str:
        return f"folder-{self.bucket}-{self.name}"

    def life(self, term: int) -> NodeLife:
        """The folder in this term as an owner in the index."""
        return NodeLife(self.node_id, term)


def folder_named(node_id: str) -> BucketFolder | None:
    """Inverse of `BucketFolder.node_id`; None for a node's id."""
    found = _ID.fullmatch(node_id)
    return BucketFolder(*found.groups()) if found else None


def folders_beside(own: BucketFolder, found: Iterable[NodePrefix]) -> list[NodePrefix]:
    """The other folders of the bucket, the deepest prefix first."""
    folders = ((each, folder_named(each.node.node_id)) for each in found)
    beside = [
        each for each, folder in folders if folder and folder.bucket == own.bucket and folder != own
    ]
    return sorted(beside, key=lambda each: (-each.usable_pages, each.node.node_id))


def with_shared(
    found: Mapping[str, NodePrefix], living: Iterable[NodeLife]
) -> dict[str, NodePrefix]:
    """With `shared_pages`: for every living node that owns a folder, how much of the chain another
    folder of that bucket has. One folder counts alone, because a tier's full pages are closed under
    prefixes: of two folders the deeper one has them all."""
    result = dict(found)
    if not any(folder_named(node_id) for node_id in found):
        return result
    for node in living:
        own = folder_named(node.folder)
        if own and (beside := folders_beside(own, found.values())):
            mine = found.get(node.node_id, NodePrefix(node, 0, 0))
            result[node.node_id] = replace(mine, shared_pages=beside[0].usable_pages)
    return result
