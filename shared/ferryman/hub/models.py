"""Models by their id on the Hugging Face hub: first their description, then their weights.

The hub's own client does the work, so its environment counts as its users know it: HF_TOKEN or a
login, HF_HOME and HF_HUB_CACHE, HF_ENDPOINT, HF_HUB_OFFLINE. A snapshot is a folder of the cache
named after its commit; the description is fetched first, and everything after it from that commit.
The client is imported where it is used, because that takes half a second.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ferryman.errors import ConfigError
from ferryman.gguf.hub_names import split_name
from ferryman.gguf.model_file import is_gguf, is_head
from ferryman.hub.client import HubModel, one_line, snapshot
from ferryman.hub.gguf_files import head_file, whole_file
from ferryman.model.weights.safetensors_header import StoredTensor

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# The files of a model besides its weights; nothing else of a repository is wanted.
DESCRIPTION = (
    "config.json",
    "hf_quant_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    INDEX_FILE,
)
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,250}\.safetensors")
_HEADER_CALLS = 8


def is_hub_id(name: str) -> bool:
    """Whether this is spelled like the id of a model, `owner/name`, or of a file of it."""
    model_id, _ = split_name(name) or (name, "")
    return _ID.fullmatch(model_id) is not None and ".." not in model_id and "--" not in model_id


def hub_model(name: str, revision: str = "") -> HubModel | None:
    """The model that a name means on the hub; None where it means a folder. A folder wins.

    Raises ConfigError for a revision of a folder.
    """
    if not is_hub_id(name) or Path(name).exists():
        if revision:
            raise ConfigError(f"--revision {revision}: {name} is no id of a model on the hub")
        return None
    model_id, file = split_name(name) or (name, "")
    return HubModel(model_id, revision, file)


def description_folder(model: HubModel) -> Path:
    """The folder of the snapshot, with config and tokenizer, or its GGUF file, which has both and
    is downloaded whole. Raises ConfigError in one line."""
    if model.file:
        return whole_file(model)
    folder = snapshot(model, model.revision or None, DESCRIPTION)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{model}: there is no config.json in it")
    return folder


def described_by_head(model: HubModel) -> Path:
    """The `description_folder`, of a GGUF file its head alone, which no loader takes for the model.
    Raises ConfigError in one line."""
    return head_file(model) if model.file else description_folder(model)


def weight_files(folder: Path) -> tuple[str, ...]:
    """The safetensors files that a description names. Raises ConfigError for impossible names."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return (SINGLE_FILE,)
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is no index of safetensors files: {error}") from None
    for name in names:
        if not isinstance(name, str) or _SHARD.fullmatch(name) is None:
            raise ConfigError(f"{index} names {name!r}; a shard is a .safetensors file beside it")
    return tuple(names)


def is_complete(folder: Path) -> bool:
    """Whether all weights are here: in the folder of the snapshot, or in a GGUF file that is not a
    head."""
    if is_gguf(folder):
        return not is_head(folder)
    return all((folder / name).is_file() for name in weight_files(folder))


def remote_tensors(model: HubModel, folder: Path) -> Mapping[str, StoredTensor]:
    """The tensors by name, from the headers of files that stay on the hub.

    Raises ConfigError for a model without safetensors, and where the hub cannot be asked.
    """
    names = weight_files(folder)
    with one_line(model), ThreadPoolExecutor(_HEADER_CALLS) as pool:
        by_file = list(pool.map(lambda name: list(_header(model, folder, name)), names))
    return {tensor.name: tensor for of_file in by_file for tensor in of_file}


def fetch_weights(model: HubModel, folder: Path) -> None:
    """Downloads the weights into the folder of the snapshot, and shows how it goes on stderr.

    Whole files are kept when a download breaks off, and a file goes on where its connection broke.
    Raises ConfigError in one line.
    """
    snapshot(model, folder.name, weight_files(folder))
    if missing := [name for name in weight_files(folder) if not (folder / name).is_file()]:
        raise _without_safetensors(model, folder.name, missing[0])


def model_folder(name: str, revision: str = "") -> Path:
    """The folder of a model by its path or its id, downloaded if need be. Raises ConfigError."""
    model = hub_model(name, revision)
    if model is None:
        return Path(name)
    folder = description_folder(model)
    if not is_complete(folder):
        fetch_weights(model, folder)
    return folder


def _header(model: HubModel, folder: Path, name: str) -> Iterator[StoredTensor]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError

    try:
        header = HfApi().parse_safetensors_file_metadata(model.model_id, name, revision=folder.name)
    except EntryNotFoundError:
        raise _without_safetensors(model, folder.name, name) from None
    for tensor, info in header.tensors.items():
        start, end = info.data_offsets
        if not all(type(n) is int and n >= 0 for n in (*info.shape, start, end)) or end < start:
            raise ConfigError(f"{model}: tensor {tensor!r} in {name} has an impossible shape")
        yield StoredTensor(tensor, folder / name, str(info.dtype), tuple(info.shape), start, end)


def _without_safetensors(model: HubModel, commit: str, missing: str) -> ConfigError:
    """Says which other weights there are, if the hub still answers."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    names: Sequence[str] = ()
    try:
        names = HfApi().list_repo_files(model.model_id, revision=commit)
    except (HfHubHTTPError, OSError):
        pass  # it is refused all the same
    others = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf")))
    has = f"; it has {others[0]}, and pickles and other formats are refused" if others else ""
    return ConfigError(f"{model} has no {missing}{has}: choose a model with safetensors")
