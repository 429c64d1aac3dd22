"""GGUF files on the hub: whole ones, and their heads.

A head is what stands before the weights: keys, vocabulary and the places of tensors. It is read by
ranges and kept beside the client's snapshots as a file of the whole one's length, with a hole in
place of the weights. Its name ends with "-head", so that no loader takes it for the model.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from uuid import uuid4

from ferryman.errors import ConfigError
from ferryman.gguf.architectures.tensor_names import WAVE_FACTORS
from ferryman.gguf.container import GgufHead, HeadCut, read_head
from ferryman.gguf.hub_names import chosen_file, shards_of
from ferryman.gguf.model_file import HEAD_ENDING
from ferryman.hub.client import HubModel, one_line, snapshot

HEAD_FOLDER = "ferryman-heads"
FIRST_BYTES = 1 << 20
GROWTH = 4
HEAD_BYTES = 64 << 20
"""A head has at most so many bytes; a vocabulary of 262,144 tokens takes some 10 MB."""
_HEAD_CALLS = 8
_SPAN = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


def whole_file(model: HubModel) -> Path:
    """The file in the folder of the snapshot, with all shards. Raises ConfigError."""
    commit, file = _chosen(model)
    return snapshot(model, commit, shards_of(file)) / file


def head_file(model: HubModel) -> Path:
    """The head of the file, with those of all shards; the file itself if it is here already.

    Raises ConfigError in one line, also for a head of more than HEAD_BYTES.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    commit, file = _chosen(model)
    names = shards_of(file)
    kept = [try_to_load_from_cache(model.model_id, name, revision=commit) for name in names]
    if all(isinstance(path, str) for path in kept):
        return Path(str(kept[0]))
    owner_and_name = model.model_id.replace("/", "--")
    folder = Path(constants.HF_HUB_CACHE) / HEAD_FOLDER / owner_and_name / commit
    with one_line(model), ThreadPoolExecutor(_HEAD_CALLS) as pool:
        heads = list(pool.map(lambda name: _fetched(model, commit, name, folder), names))
    return heads[0]


def _chosen(model: HubModel) -> tuple[str, str]:
    """The commit, and the name of the file in it."""
    from huggingface_hub import HfApi, constants, snapshot_download

    with one_line(model):
        if constants.HF_HUB_OFFLINE:
            folder = Path(snapshot_download(model.model_id, revision=model.revision or None))
            commit, names = folder.name, [str(p.relative_to(folder)) for p in folder.rglob("*")]
        else:
            info = HfApi().model_info(model.model_id, revision=model.revision or "main")
            commit, names = str(info.sha), [part.rfilename for part in info.siblings or ()]
    try:
        return commit, chosen_file(names, model.file)
    except ConfigError as error:
        raise ConfigError(f"{model}: {error}") from None


def _fetched(model: HubModel, commit: str, name: str, folder: Path) -> Path:
    """The head of one file, from the hub unless it was fetched before."""
    path = folder / f"{name}{HEAD_ENDING}"
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with draft.open("wb") as file:
            _write_head(_Ranges(model, commit, name), file)
        # Whole or not at all: several commands may fetch it at once.
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


@dataclass(slots=True)
class _Ranges:
    """The bytes of a file on the hub from its start on; `num_bytes` of all of it, once asked."""

    model: HubModel
    commit: str
    name: str
    content: bytearray = field(default_factory=bytearray)
    num_bytes: int = 0

    def grow(self, end: int) -> None:
        """Makes `content` the first `end` bytes, or all there are."""
        self.content += self.read(len(self.content), end)

    def read(self, start: int, end: int) -> bytes:
        """The bytes [start, end), or to the file's end. Raises ConfigError for a hub that sends
        others, before it sends them all."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils._headers import build_hf_headers
        from huggingface_hub.utils._http import hf_raise_for_status

        url = hf_hub_url(self.model.model_id, self.name, revision=self.commit)
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}"}
        with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
            hf_raise_for_status(response)
            span = _SPAN.fullmatch(response.headers.get("Content-Range", ""))
            if span is None or int(span[1]) != start or int(span[2]) >= end:
                raise ConfigError(
                    f"{self.model}: the hub sends no parts of {self.name}; download it, and name "
                    "the file"
                )
            self.num_bytes = int(span[3])
            return bytes(response.read())


def _write_head(ranges: _Ranges, file: IO[bytes]) -> None:
    head = _head(ranges)
    file.write(ranges.content)
    # Factors of waves are a small tensor, and a part of the config.
    for tensor in head.tensors:
        if tensor.name in WAVE_FACTORS and tensor.end - tensor.start <= FIRST_BYTES:
            file.seek(tensor.start)
            file.write(ranges.read(tensor.start, tensor.end))
    os.truncate(file.fileno(), ranges.num_bytes)


def _head(ranges: _Ranges) -> GgufHead:
    """The head, for which `content` grows. Raises ConfigError for one that is no GGUF file's."""
    end = FIRST_BYTES
    while True:
        ranges.grow(end)
        where = Path(ranges.model.model_id) / ranges.name
        try:
            return read_head(where, memoryview(bytes(ranges.content)), ranges.num_bytes)
        except HeadCut:
            if len(ranges.content) >= ranges.num_bytes:
                raise
        if end >= HEAD_BYTES:
            raise ConfigError(
                f"{ranges.model}: the head of {ranges.name} has more than {HEAD_BYTES >> 20} MiB; "
                "download it, and name the file"
            )
        end = min(end * GROWTH, HEAD_BYTES)
