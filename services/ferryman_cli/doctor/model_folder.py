"""Checks of a model folder: that it can be read, that it makes text, and that it is what the
running cluster has loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ferryman.errors import ConfigError, FerrymanError
from ferryman_cli.doctor.fault_report import DoctorFinding, warning
from ferryman_launcher.checks.model_places import EVERYTHING_HERE, ModelPlaces
from ferryman_launcher.model_files import changed_files


def folder_findings(folder: Path, places: ModelPlaces = EVERYTHING_HERE) -> Iterator[DoctorFinding]:
    """Whether a start could read this folder. Reads the headers of its weights only."""
    from ferryman.gguf.documents import has_document
    from ferryman.model.config import load_config
    from ferryman_launcher.options import check_model_folder

    try:
        check_model_folder(folder)
        load_config(folder)
    except ConfigError as error:
        yield DoctorFinding(
            "model", str(error), "name another folder: ferryman models lists what is read"
        )
        return  # without a config nothing else in the folder has a meaning
    if not has_document(folder / "tokenizer.json"):
        yield DoctorFinding(
            "tokenizer",
            f"{folder} has no tokenizer.json, so no text can be read",
            f"bring tokenizer.json and tokenizer_config.json from where the model was published to"
            f" {folder}",
        )
    else:
        yield from _template_findings(folder)
    try:
        places.files(folder)
    except (ConfigError, OSError) as error:
        yield DoctorFinding(
            "weights",
            str(error),
            f"fetch the files anew; sha256sum {folder}/*.safetensors compares them with the"
            " publisher's",
        )


def _template_findings(folder: Path) -> Iterator[DoctorFinding]:
    from ferryman.text.tokenizer import Tokenizer

    try:
        template = Tokenizer.load(folder).chat_template
    except FerrymanError as error:
        yield DoctorFinding("tokenizer", f"{folder}: {error}", "fetch tokenizer.json anew")
        return
    if template is None:
        yield warning(
            "template",
            f"{folder} has no chat template: /v1/completions answers, chat is refused",
            f"bring chat_template.jinja, or tokenizer_config.json with one, to {folder}",
        )


def change_findings(folder: str, loaded: Mapping[str, str]) -> Iterator[DoctorFinding]:
    """The files that are others than those which the running workers have read: `loaded`, as the
    state folder has them."""
    if folder and (names := changed_files(Path(folder), loaded)):
        yield DoctorFinding(
            "weights-changed",
            f"{', '.join(names)} in {folder} changed since the cluster started: a worker that is"
            " started again would be another model",
            "ferryman roll --even-last, so that all workers load what is there now; or bring the"
            " old files back",
        )
