"""Files from the Hugging Face Hub, named as hf:owner/name[@revision][:file].

A name is resolved to a commit, and the file goes into the Hub's own cache. It can do no more than any other file of
somebody else: it is read as data. A name that only a record contains is never downloaded; see `extensions.Origin`.
"""

import hashlib
import os
import re
import socket
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..console import shown
from ..errors import AnchorholdError, ModelError, lacks_memory
from ..runs.folder import EXPORT
from ..version import __version__

__all__ = ["ABOUT", "PATIENCE", "Fetched", "HubName", "called", "fetch", "impatient", "plain_progress", "refusal"]

ABOUT: dict[str, Any] = {"library_name": "anchorhold", "library_version": __version__}
PATIENCE = 10.0  # seconds until the Hub must answer; its own retries take minutes

_NAME = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@([^:@]+))?(?::(.+))?", re.ASCII | re.DOTALL)
_REVISION = re.compile(r"[^\s~^:?*\[\\]+")
_SHA256, _COMMIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
_LISTED, _READ = 12, 1000  # files that a message names, and that are looked at for it
_WEIGHTS = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".tar")


@dataclass(frozen=True)
class HubName:
    """A repository of the Hub, with a revision and a file where they are given."""

    repo: str
    revision: str = ""
    file: str = ""

    @classmethod
    def parse(cls, text: str) -> "HubName":
        """Read a name; one that could lead out of the repository or of the cache is refused.

        >>> HubName.parse("hf:madrylab/robust-imagenet-models@main:resnet18_linf_eps4.0.ckpt").file
        'resnet18_linf_eps4.0.ckpt'
        """
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        found = _NAME.fullmatch(text)
        form = "write hf:owner/name, hf:owner/name@revision or hf:owner/name:file"
        if found is None:
            raise ModelError(f"{_brief(text)} is no name on the Hugging Face Hub; {form}")
        repo, revision, file = found[1], found[2] or "", found[3] or ""
        try:
            validate_repo_id(repo)
        except HFValidationError:
            raise ModelError(f"{_brief(repo)} cannot be a repository on the Hugging Face Hub; {form}") from None
        if revision and not (_REVISION.fullmatch(revision) and _inside(revision)):
            raise ModelError(f"{_brief(text)}: {_brief(revision)} is no revision; give a branch, a tag or a commit")
        if file and not _inside(file):
            raise ModelError(f"{_brief(text)}: {_brief(file)} is no file of a repository; give its path inside, no ..")
        return cls(repo, revision, file)

    def __str__(self) -> str:
        return f"hf:{self.repo}{f'@{self.revision}' * bool(self.revision)}{f':{self.file}' * bool(self.file)}"


@dataclass(frozen=True)
class Fetched:
    """A downloaded file: its place on this machine, its name with the commit, and its hash."""

    path: Path
    name: str
    sha256: str

    def __str__(self) -> str:
        return self.name


def fetch(text: str | Path) -> Fetched:
    """Download what hf:owner/name[@revision][:file] names, or find it in the cache; the default is model.safetensors.

    Without a connection, the revision that was downloaded last is used.
    """
    name = HubName.parse(str(text))
    whole = replace(name, file=name.file or EXPORT)
    with plain_progress():
        path, known = _download(name, whole)
    commit = path.parents[whole.file.count("/")].name  # …/snapshots/COMMIT/FILE
    if not _COMMIT.fullmatch(commit):
        raise ModelError(f"{name}: {path} is not in the layout of the Hub's cache; update huggingface_hub")
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    # The Hub names large files by their hash; its client compares only their length. The link in the cache is to the
    # file of this very commit, which may be newer than the answer.
    known = Path(os.readlink(path)).name if path.is_symlink() else known
    if _SHA256.fullmatch(known) and known != found:
        raise ModelError(f"{name}: the file in the cache is damaged; remove {path.resolve()} and download it again")
    return Fetched(path, str(replace(whole, revision=commit)), found)


def _download(name: HubName, whole: HubName) -> tuple[Path, str]:
    """The place of a file in the cache, and its hash by the Hub ("" if the Hub was not asked)."""
    import huggingface_hub as hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    revision, known, missing = whole.revision or None, "", "HF_HUB_OFFLINE is set"
    todo = "unset it for the first download"
    asked = not constants.HF_HUB_OFFLINE
    if asked:
        try:
            url = hub.hf_hub_url(whole.repo, whole.file, revision=revision)
            told = hub.get_hf_file_metadata(url, timeout=PATIENCE, **ABOUT)
            known = told.etag or ""
            if not told.commit_hash:
                raise ValueError("it does not answer as the Hub does")
        except HfHubHTTPError as error:
            if error.response.status_code < 500:
                raise _absent(name, whole, error) from None
            asked, missing, todo = False, f"the Hub answers {error.response.status_code}", "try again later"
        except Exception as error:  # the network may raise anything
            if lacks_memory(error):
                raise
            asked, missing = False, f"{constants.ENDPOINT} cannot be reached ({_first(error)})"
            todo = "check the network, the proxy and HF_ENDPOINT"
    try:
        options: dict[str, Any] = {"revision": revision, "local_files_only": not asked, **ABOUT}
        return Path(hub.hf_hub_download(whole.repo, whole.file, **options)), known
    except LocalEntryNotFoundError as error:
        if asked:  # the connection was lost since the question
            missing, todo = f"the download failed ({_first(error.__cause__ or error)})", "try again"
        raise ModelError(f"{whole}: {missing}, and the file is not in the cache; {todo}, or give a file") from None
    except HfHubHTTPError as error:
        raise _absent(name, whole, error) from None
    except Exception as error:  # the network or the disk
        if lacks_memory(error):
            raise
        raise ModelError(f"{whole}: the download failed ({_first(error)}); try again, or give a file") from None


def _absent(name: HubName, whole: HubName, error: Any) -> ModelError:
    """The error for an answer of the Hub; a missing file is reported with the files that there are."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError
    from huggingface_hub.hf_api import RepoFile

    if not isinstance(error, EntryNotFoundError):
        return refusal(name, error)
    try:
        tree = HfApi(**ABOUT).list_repo_tree(whole.repo, revision=whole.revision or None, recursive=True)
        there = [each.path for each in islice(tree, _READ) if isinstance(each, RepoFile)]
    except Exception:  # the list is only a help
        there = []
    files = sorted((each for each in there if not each.startswith(".")), key=lambda f: not f.endswith(_WEIGHTS))
    listed = ", ".join(shown(each[:80]) for each in files[:_LISTED]) + (", …" if len(files) > _LISTED else "")
    place = replace(name, file="")
    if name.file:
        todo = f"it has {listed}" if listed else "check its name"
        return ModelError(f"{place} has no file {_brief(name.file)}; {todo}")
    return ModelError(f"{place} has no {EXPORT}; name a file, {place}:FILE{f', of {listed}' if listed else ''}")


def refusal(name: HubName, error: Any) -> ModelError:
    """The one-line error for an answer of the Hub other than success."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    status = getattr(getattr(error, "response", None), "status_code", None)
    login = "log in with `hf auth login`, or set HF_TOKEN"
    if isinstance(error, GatedRepoError):
        page = f"{constants.ENDPOINT}/{name.repo}"
        return ModelError(f"hf:{name.repo} is gated; accept its terms at {page}, and {login}")
    if isinstance(error, RevisionNotFoundError):
        wanted = _brief(name.revision or "main")
        return ModelError(f"hf:{name.repo} has no revision {wanted}; give a branch, a tag or a commit")
    if isinstance(error, RepositoryNotFoundError):
        return ModelError(f"hf:{name.repo}: no such repository, or it is private; check the name, or {login}")
    if status == 401:
        return ModelError(f"hf:{name.repo}: the Hub does not accept your token; {login}")
    if status == 403:
        return ModelError(f"hf:{name.repo}: your token gives no access; ask its owner, or use another token (HF_TOKEN)")
    if status is not None:
        return ModelError(f"hf:{name.repo}: the Hub answers {status} ({_first(error)}); try again later")
    return ModelError(
        f"hf:{name.repo}: {constants.ENDPOINT} cannot be reached ({_first(error)}); check the network, HF_ENDPOINT "
        "and HF_HUB_OFFLINE"
    )


@contextmanager
def called(fetched: object) -> Iterator[None]:
    """Let errors about a downloaded file call it by its name on the Hub, not by its place in the cache."""
    try:
        yield
    except AnchorholdError as error:
        if not isinstance(fetched, Fetched) or str(fetched.path) not in str(error):
            raise
        raise type(error)(str(error).replace(str(fetched.path), fetched.name)) from None


@contextmanager
def plain_progress() -> Iterator[None]:
    """Show the Hub's progress bars only on a terminal."""
    from huggingface_hub import constants
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    decided = constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or are_progress_bars_disabled()
    if decided or (sys.stderr is not None and sys.stderr.isatty()):
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def impatient() -> Iterator[None]:
    """Use only the cache if the Hub is unreachable: its own retries take most of a minute."""
    try:
        from huggingface_hub import constants
    except ImportError:
        yield
        return
    before = constants.HF_HUB_OFFLINE
    try:
        constants.HF_HUB_OFFLINE = before or not _reachable(constants.ENDPOINT)
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _reachable(url: str) -> bool:
    parts = urlsplit(url)
    if parts.scheme in urllib.request.getproxies():
        return True  # the proxy connects, so it cannot be tested here
    usual = 80 if parts.scheme == "http" else 443
    try:
        socket.create_connection((parts.hostname or "", parts.port or usual), timeout=5).close()
    except OSError:
        return False
    return True


def _inside(path: str) -> bool:
    """Whether a relative path stays inside its folder, and is plain text."""
    parts = path.split("/")
    return path.isprintable() and "\\" not in path and not {"", ".", ".."} & set(parts) and len(path) <= 1000


def _brief(text: str) -> str:
    return repr(shown(text[:120]))


def _first(error: BaseException) -> str:
    """The first line of an error, without the Hub's request ids."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return shown(f"{type(error).__name__}: {line}"[:160] if line else type(error).__name__)
