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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ferryman.errors import ConfigError
from ferryman.gguf.hub_names import chosen_file, shards_of, split_name
from ferryman.gguf.model_file import is_gguf
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


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub; without a revision its main branch. `file` is the GGUF file that is
    wanted of it, or the type that its name ends with; empty for a model in safetensors."""

    model_id: str
    revision: str = ""
    file: str = ""

    def __str__(self) -> str:
        name = f"{self.model_id}:{self.file}" if self.file else self.model_id
        return f"{name} at {self.revision}" if self.revision else name


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
        return _gguf_file(model)
    folder = _snapshot(model, model.revision or None, DESCRIPTION)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{model}: there is no config.json in it")
    return folder


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
    """Whether all weights are in the folder of the snapshot; a GGUF file is downloaded whole."""
    return is_gguf(folder) or all((folder / name).is_file() for name in weight_files(folder))


def remote_tensors(model: HubModel, folder: Path) -> Mapping[str, StoredTensor]:
    """The tensors by name, from the headers of files that stay on the hub.

    Raises ConfigError for a model without safetensors, and where the hub cannot be asked.
    """
    names = weight_files(folder)
    with _one_line(model), ThreadPoolExecutor(_HEADER_CALLS) as pool:
        found = list(pool.map(lambda name: list(_header(model, folder, name)), names))
    return {tensor.name: tensor for of_file in found for tensor in of_file}


def fetch_weights(model: HubModel, folder: Path) -> None:
    """Downloads the weights into the folder of the snapshot, and shows how it goes on stderr.

    Whole files are kept when a download breaks off, and a file goes on where its connection broke.
    Raises ConfigError in one line.
    """
    _snapshot(model, folder.name, weight_files(folder))
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


def _gguf_file(model: HubModel) -> Path:
    """The file in the folder of the snapshot, with all shards."""
    from huggingface_hub import HfApi, constants, snapshot_download

    with _one_line(model):
        if constants.HF_HUB_OFFLINE:
            folder = Path(snapshot_download(model.model_id, revision=model.revision or None))
            commit, names = folder.name, [str(p.relative_to(folder)) for p in folder.rglob("*")]
        else:
            info = HfApi().model_info(model.model_id, revision=model.revision or "main")
            commit, names = str(info.sha), [part.rfilename for part in info.siblings or ()]
    try:
        file = chosen_file(names, model.file)
    except ConfigError as error:
        raise ConfigError(f"{model}: {error}") from None
    return _snapshot(model, commit, shards_of(file)) / file


def _snapshot(model: HubModel, revision: str | None, names: Sequence[str]) -> Path:
    with _one_line(model):
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(model.model_id, revision=revision, allow_patterns=list(names))
        )


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


@contextmanager
def _one_line(model: HubModel) -> Iterator[None]:
    """Says in one line what went wrong with the hub, and what to do."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    try:
        yield
    except errors.HFValidationError as error:
        raise ConfigError(f"--model {model.model_id}: {error}") from None
    except errors.GatedRepoError:
        raise ConfigError(
            f"{model} is gated: accept its terms at {hub}/{model.model_id}, then set HF_TOKEN "
            "or run `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(
            f"{model.model_id} has no revision {model.revision or 'main'}: name a branch, a tag or "
            "a commit of it"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{model.model_id}: no folder here, and no such model at {hub}; if it is private, set "
            "HF_TOKEN or run `hf auth login`"
        ) from None
    except Exception as error:
        raise _unreachable(model, error) from None


def _unreachable(model: HubModel, error: Exception) -> Exception:
    """The error for a hub that did not answer, or not to the end; another error as it is."""
    import httpx2
    from huggingface_hub import constants, errors

    if constants.HF_HUB_OFFLINE:
        why = f"HF_HUB_OFFLINE is set, and not all of {model} is in {constants.HF_HUB_CACHE}"
        return ConfigError(f"{why}: unset it, or name a folder that has the model")
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        return ConfigError(f"{model}: {constants.ENDPOINT} answers {status}; try again later")
    if isinstance(error, (errors.LocalEntryNotFoundError, httpx2.HTTPError)):
        return ConfigError(
            f"{model}: {constants.ENDPOINT} cannot be reached, and not all of the model is in "
            f"{constants.HF_HUB_CACHE}: connect and run this again, or name a folder"
        )
    if isinstance(error, (OSError, errors.SafetensorsParsingError)):
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return ConfigError(f"{model}: the download failed: {reason}; run this again, it goes on")
    return error
