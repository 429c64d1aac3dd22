"""The places of a cluster's models: folders, and the models on the hub that some of them are of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ferryman.gguf.model_file import is_gguf
from ferryman.hub.client import HubModel
from ferryman.hub.models import (
    described_by_head,
    description_folder,
    fetch_weights,
    hub_model,
    is_complete,
    is_hub_id,
    remote_tensors,
)
from ferryman.settings.sources import GivenValue, Origin, Source, Sources

if TYPE_CHECKING:
    from ferryman.sizing.worker_size import ModelFiles


@dataclass(frozen=True, slots=True)
class ModelPlaces:
    """The models of snapshots by their folders; other folders are here already."""

    snapshots: Mapping[Path, HubModel] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def files(self, folder: Path) -> ModelFiles:
        """A model's tensors, from headers on the hub while its weights are not here.

        Raises ConfigError.
        """
        from ferryman.sizing.worker_size import ModelFiles, model_files  # imports torch

        model = self.snapshots.get(folder)
        if model is None or is_gguf(folder) or is_complete(folder):
            return model_files(folder)
        return ModelFiles(folder, remote_tensors(model, folder))

    def missing(self) -> Iterator[tuple[Path, HubModel]]:
        return ((folder, m) for folder, m in self.snapshots.items() if not is_complete(folder))

    def fetch(self) -> None:
        """Downloads the weights that are not here. Raises ConfigError."""
        for folder, model in self.missing():
            fetch_weights(model, folder)


EVERYTHING_HERE = ModelPlaces()


def locate(
    sources: Sources, describe: Callable[[HubModel], Path] = description_folder
) -> tuple[Sources, ModelPlaces]:
    """The same sources with folders in place of ids, whose descriptions are downloaded by
    `describe`: for a command that loads no weights `described_by_head`.

    A served model is called by its id, unless another name is given. Raises ConfigError.
    """
    snapshots: dict[Path, HubModel] = {}
    folders, names, notes = {}, {}, []
    settings = {name: sources.find("", name) for name in ("model", "draft", "revision")}
    revision = str(settings["revision"].value) if settings["revision"] else ""
    for name in ("model", "draft"):
        setting = settings[name]
        asked = str(setting.value) if setting else ""
        if not asked:
            continue
        if is_hub_id(asked) and Path(asked).is_dir():
            notes.append(f"{asked} is a folder here, which counts before a model of this id")
        model = hub_model(asked, revision if name == "model" else "")
        if model is None:
            continue
        folder = describe(model)
        snapshots[folder] = model
        folders["", name] = GivenValue(str(folder), Origin.DERIVED, f"of {model}")
        if name == "model":
            names["", "served_name"] = GivenValue(asked, Origin.DERIVED, "")
    places = ModelPlaces(snapshots, tuple(notes))
    return Sources((Source(folders), *sources.sources, Source(names))), places


def described(name: str) -> Path:
    """The folder with the config of a model, by its path or its id. Raises ConfigError."""
    model = hub_model(name)
    return Path(name) if model is None else described_by_head(model)
