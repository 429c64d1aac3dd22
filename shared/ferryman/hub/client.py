"""The hub's own client: snapshots of models, and its errors in one line.

The client is imported where it is used, because that takes half a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ferryman.errors import ConfigError


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


def snapshot(model: HubModel, revision: str | None, names: Sequence[str]) -> Path:
    """The folder of a snapshot with these of its files. Raises ConfigError in one line."""
    with one_line(model):
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(model.model_id, revision=revision, allow_patterns=list(names))
        )


@contextmanager
def one_line(model: HubModel) -> Iterator[None]:
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
