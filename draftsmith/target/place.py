"""Where a target lies: a directory, a GGUF file, or a hub repository, of which only the files that are asked for are downloaded."""

from __future__ import annotations

import difflib
import json
import re
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from draftsmith.core.hub import Snapshot, snapshot
from draftsmith.target.gguf_header import gguf_config

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class Place(ABC):
    """Files of one target by name."""

    name: str

    @abstractmethod
    def files(self) -> list[str]:
        """Names of all files. Raises ValueError when the place cannot be listed."""

    @abstractmethod
    def path(self, file: str) -> Path:
        """A file on this machine, fetched if need be. Raises ValueError when it cannot be had."""

    def has(self, file: str) -> bool:
        """Whether it has a file; also one in a folder of its own."""
        return file in self.files()

    @property
    def pretrained(self) -> tuple[str, dict[str, Any]]:
        """What `from_pretrained` takes to load the same files: a name, and arguments."""
        return self.name, {}

    def config(self) -> PreTrainedConfig:
        """The configuration, as the installed transformers understands it. Raises ValueError when it does not."""
        if not self.has("config.json"):
            raise ValueError(self._no_config(self.files()))
        path = self.path("config.json")
        try:
            return AutoConfig.from_pretrained(path.parent, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(_remote_code(self.name, path) or f"{self.name}/config.json is not understood by the installed transformers: {error}") from error

    def _no_config(self, present: list[str]) -> str:
        if "adapter_config.json" in present:
            base = _adapter_base(self.path("adapter_config.json"))
            return (
                f"{self.name} is a LoRA adapter, not a whole model: it holds no embedding and no head of its own. Merge it into its base {base!r} "
                "(peft: merge_and_unload, then save_pretrained) and give the merged directory"
            )
        if not present:
            return f"{self.name} is an empty directory; expected a Hugging Face checkpoint: config.json and weights"
        gguf = sorted(f for f in present if f.lower().endswith(".gguf"))
        if gguf:
            return f"{self.name} has no config.json, and holds GGUF files: give the path of one of them, for example {self.name}/{gguf[0]}"
        return f"{self.name} is no Hugging Face checkpoint: it has no config.json (it holds {', '.join(sorted(present)[:4])})"


class LocalPlace(Place):
    """A directory."""

    def __init__(self, folder: Path) -> None:
        self.name, self.folder = str(folder), folder

    def files(self) -> list[str]:
        try:
            return [p.name for p in self.folder.iterdir() if p.is_file()]
        except OSError as error:
            raise ValueError(f"{self.folder} cannot be listed ({error.strerror}): check its permissions") from error

    def has(self, file: str) -> bool:
        return (self.folder / file).is_file()

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

    @property
    def pretrained(self) -> tuple[str, dict[str, Any]]:
        return str(self.file.parent), {"gguf_file": self.file.name}

    def config(self) -> PreTrainedConfig:
        return gguf_config(self.file)


class HubPlace(Place):
    """A hub repository at a revision; without network, whatever of it is cached."""

    def __init__(self, repository: str, revision: str | None) -> None:
        self.name, self.revision = repository, revision

    @cached_property
    def snapshot(self) -> Snapshot:
        """The repository at the commit that the revision is, asked once. Raises ValueError when it cannot be had."""
        try:
            return snapshot(self.name, self.revision)
        except ValueError as error:
            raise ValueError(f"no such target: {self.name!r} is not a directory{near(Path(self.name))}; as a hub id: {error}") from error

    @property
    def pretrained(self) -> tuple[str, dict[str, Any]]:
        return self.name, {"revision": self.snapshot.commit, "local_files_only": bool(self.snapshot.unreachable)}

    def files(self) -> list[str]:
        return list(self.snapshot.files)

    def path(self, file: str) -> Path:
        return self.snapshot.path(file)


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
    if _HUB_ID.fullmatch(where.rstrip("/")):
        return HubPlace(where.rstrip("/"), revision)
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


def _remote_code(name: str, config: Path) -> str | None:
    """The refusal of a family that exists as code inside the checkpoint only; None for others."""
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
        family, code = found.get("model_type"), ", ".join(sorted(str(v) for v in found["auto_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if family in CONFIG_MAPPING_NAMES:
        return None
    return (
        f"{name}: model_type {family!r} is not known to the installed transformers; it exists as code inside the checkpoint only "
        f"({code}), which is not run: it could do anything, and its head and logit rule would be guesses. "
        "Update transformers if it knows the family by now, or give a checkpoint converted to a family that it knows"
    )
