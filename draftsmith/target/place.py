"""Where a target lies: a directory, a GGUF file, or a hub repository, of which only the files that are asked for are downloaded."""

from __future__ import annotations

import difflib
import json
import re
from abc import ABC, abstractmethod
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class Place(ABC):
    """Files of one target by name."""

    name: str
    revision: str | None = None

    @abstractmethod
    def files(self) -> list[str]:
        """Names of all files. Raises ValueError when the place cannot be listed."""

    @abstractmethod
    def path(self, file: str) -> Path:
        """A file on this machine, fetched if need be. Raises ValueError when it cannot be had."""

    def config(self) -> PreTrainedConfig:
        """The configuration, as the installed transformers understands it. Raises ValueError when it does not."""
        present = self.files()
        if "config.json" not in present:
            raise ValueError(self._no_config(present))
        folder = self.path("config.json").parent
        try:
            return AutoConfig.from_pretrained(folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.name}/config.json is not understood by the installed transformers: {error}") from error

    def _no_config(self, present: list[str]) -> str:
        if "adapter_config.json" in present:
            base = _adapter_base(self.path("adapter_config.json"))
            return (
                f"{self.name} is a LoRA adapter, not a whole model: it holds no embedding and no head of its own. Merge it into its base {base!r} "
                "(peft: merge_and_unload, then save_pretrained) and give the merged directory"
            )
        if not present:
            return f"{self.name} is an empty directory; expected a Hugging Face checkpoint: config.json and weights"
        return f"{self.name} is no Hugging Face checkpoint: it has no config.json (it holds {', '.join(sorted(present)[:4])})"


class LocalPlace(Place):
    """A directory."""

    def __init__(self, folder: Path) -> None:
        self.name, self.folder = str(folder), folder

    def files(self) -> list[str]:
        return [p.name for p in self.folder.iterdir() if p.is_file()]

    def path(self, file: str) -> Path:
        found = self.folder / file
        if not found.is_file():
            raise ValueError(f"{found} is not there: download the checkpoint again")
        return found


class GgufPlace(Place):
    """One GGUF file."""

    def __init__(self, file: Path) -> None:
        self.name, self.file = str(file), file

    def files(self) -> list[str]:
        return [self.file.name]

    def path(self, file: str) -> Path:
        return self.file.parent / file

    def config(self) -> PreTrainedConfig:
        try:
            return AutoConfig.from_pretrained(self.file.parent, gguf_file=self.file.name)
        except ImportError as error:
            raise ValueError(f"{self.file}: reading GGUF needs an extra: pip install 'draftsmith[gguf]' ({error})") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{self.file} is not understood by the installed transformers as GGUF: {error}") from error


class HubPlace(Place):
    """A hub repository at a revision; without network, whatever of it is cached."""

    def __init__(self, repository: str, revision: str | None) -> None:
        self.name, self.revision = repository, revision
        self._files: list[str] | None = None

    def files(self) -> list[str]:
        if self._files is None:
            self._files = self._listed()
        return self._files

    def path(self, file: str) -> Path:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            return Path(hf_hub_download(self.name, file, revision=self.revision))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise ValueError(f"{self.name}: {file} is not in the local cache and cannot be downloaded ({_first_line(error)}). {self._cached_note()}") from error

    def _listed(self) -> list[str]:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError

        try:
            return HfApi().list_repo_files(self.name, revision=self.revision)
        except RevisionNotFoundError as error:
            raise ValueError(f"{self.name} has no revision {self.revision!r} on the hub; give a branch, a tag or a commit that exists") from error
        except RepositoryNotFoundError as error:
            raise ValueError(f"no such target: {self.name!r} is neither a directory here nor a repository on the hub (or it is gated: log in first)") from error
        except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
            cached = self._cached()
            if "config.json" in cached:
                return cached
            raise ValueError(
                f"no such target: {self.name!r} is not a directory{near(Path(self.name))}, and the hub cannot be reached "
                f"({_first_line(error)}). {self._cached_note()}"
            ) from error

    def _cached(self) -> list[str]:
        """Files of the cached snapshot of this revision."""
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(self.name, revision=self.revision, local_files_only=True))
        except (OSError, ValueError):
            return []
        return [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()]

    def _cached_note(self) -> str:
        cached = sorted(self._cached())
        return f"Cached of it: {', '.join(cached)}." if cached else "Nothing of it is cached."


def locate(where: str, revision: str | None = None) -> Place:
    """The place that a user names: an existing path, else a hub id.

    Raises ValueError, with the closest sibling, for a path that does not exist, and for a revision of a local path.
    """
    path = Path(where).expanduser()
    if path.exists() and revision is not None:
        raise ValueError(f"revision {revision!r} was given for {where!r}, which is a local path: a revision belongs to a hub repository")
    if path.is_dir():
        return LocalPlace(path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"no such target: {where} is a file; expected a Hugging Face checkpoint directory, a .gguf file or a hub id")
        return GgufPlace(path)
    if _HUB_ID.fullmatch(where) and not where.startswith("."):
        return HubPlace(where, revision)
    raise ValueError(f"no such target: {where!r} is not a directory{near(path)}; expected a Hugging Face checkpoint directory, a .gguf file or a hub id")


def near(path: Path) -> str:
    """The closest sibling of a path that does not exist, as a question; empty without one."""
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    found = difflib.get_close_matches(path.name, siblings, n=1)
    return f" (did you mean {path.with_name(found[0])}?)" if found else ""


def _adapter_base(path: Path) -> str:
    try:
        return str(json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path"))
    except (ValueError, AttributeError):
        return "(not named in adapter_config.json)"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
