"""The Hugging Face hub, asked once and briefly: which commit a revision is, and which files it has; without network, what the cache holds of it.

Everything is then fetched at that commit, so that configuration, weights and tokenizer belong together, and what is cached is never asked for again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ANSWER_SECONDS = 5.0
"""How long the hub may take to answer before the cache is used instead."""


@dataclass(frozen=True)
class Snapshot:
    """A repository at one commit. `unreachable` is the reason why the hub could not be asked: then `files` are the cached ones. Empty: all files."""

    repository: str
    commit: str
    files: tuple[str, ...]
    unreachable: str = ""

    def path(self, file: str) -> Path:
        """A file on this machine, downloaded if it is not cached. Raises ValueError when it cannot be had."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import GatedRepoError, HTTPError

        try:
            return Path(hf_hub_download(self.repository, file, revision=self.commit, local_files_only=bool(self.unreachable)))
        except GatedRepoError as error:
            raise ValueError(_gated(self.repository)) from error
        except (HTTPError, OSError, ValueError) as error:
            why = self.unreachable or _first_line(error)
            raise ValueError(
                f"{self.repository}: {file} is not cached and cannot be downloaded ({why}). Cached of it: {', '.join(cached(self.repository, self.commit))}"
            ) from error


def snapshot(repository: str, revision: str | None = None) -> Snapshot:
    """The commit of a revision (None: the hub's default branch) and its files.

    Raises ValueError, within seconds, when there is no such repository or revision, when it is gated, or when the hub is out of reach and nothing
    of that revision is cached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError, RevisionResolutionError

    try:
        info = HfApi().model_info(repository, revision=revision, timeout=ANSWER_SECONDS)
        HfApi().resolve_revision(repository, revision=revision)  # the cache then knows the revision's commit, also without network
        return Snapshot(repository, str(info.sha), tuple(s.rfilename for s in info.siblings or ()))
    except HFValidationError as error:
        raise ValueError(f"{repository!r} is no hub id: {_first_line(error)}") from error
    except GatedRepoError as error:
        raise ValueError(_gated(repository)) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{repository} has no revision {revision!r} on the hub; give a branch, a tag or a commit that exists") from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"the hub has no repository {repository!r} (a private one needs a login first: hf auth login, or HF_TOKEN)") from error
    except (HTTPError, RevisionResolutionError, OSError, ValueError) as error:
        return _from_cache(repository, revision, _first_line(error))


def _from_cache(repository: str, revision: str | None, why: str) -> Snapshot:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionResolutionError

    try:
        commit = HfApi().resolve_revision(repository, revision=revision, local_files_only=True).resolved
        files = cached(repository, commit)
    except RevisionResolutionError:
        commit, files = "", ()
    if not files:
        others = _cached_revisions(repository)
        held = f"of it only {', '.join(others)} is cached, not {revision or 'main'}" if others else "nothing of it is cached"
        raise ValueError(f"the hub cannot be reached ({why}), and {held}: {repository!r} needs network once")
    return Snapshot(repository, commit, files, why)


def cached(repository: str, commit: str) -> tuple[str, ...]:
    """Files of a commit that the cache holds."""
    folder = _cache_folder(repository) / "snapshots" / commit
    return tuple(sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()))


def _cached_revisions(repository: str) -> list[str]:
    """Branches and tags in the cache, and commits that no branch or tag there names."""
    folder = _cache_folder(repository)
    refs = {str(p.relative_to(folder / "refs")): p.read_text().strip() for p in (folder / "refs").rglob("*") if p.is_file()}
    commits = {p.name for p in folder.glob("snapshots/*") if p.is_dir()}
    return sorted([r for r, commit in refs.items() if commit in commits] + list(commits - set(refs.values())))


def _cache_folder(repository: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")


def _gated(repository: str) -> str:
    return f"{repository} is gated: accept its terms on the hub, then log in (hf auth login, or set HF_TOKEN) and run the same command again"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}".rstrip(": ")
