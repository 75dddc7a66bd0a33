"""Sharing a model on the Hugging Face Hub: its file, the summary of its run, and its card, in one commit.

Nothing that is uploaded contains a path of your machine.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import safetensors

from ..console import shown
from ..errors import ModelError, RunError, check, lacks_memory
from ..runs.fields import dig, parsed
from ..runs.folder import EXPORT, Run, without_nan
from ..runs.summary import without_paths
from ..runs.writing import atomic
from ..version import __version__
from .card import Audited, card_text, facts_of, info_of
from .hub import ABOUT, PATIENCE, HubName, plain_progress, refusal
from .weights import METADATA, check_model, digest

if TYPE_CHECKING:
    from .embedder import Embedder
    from .trainable import Trainable

__all__ = ["OnHub", "prepared", "repository", "uploaded"]

_FILES = {EXPORT, "README.md", "run.json"}


class OnHub:
    """What models have to do with the Hub."""

    hub: str = ""  # hf:owner/name@commit:file, if it was loaded from there

    def push_to_hub(
        self,
        repo: str,
        *,
        run: Run | str | Path | None = None,
        audit: Audited | str | Path | None = None,
        license: str = "",
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str = "",
    ) -> str:
        """Upload the model to the Hugging Face Hub with a model card; returns its name with the commit.

        The repository is created if it does not exist. Its README.md is replaced.

        Args:
            repo: owner/name.
            run: the run that trained it; a summary without paths is uploaded, and the card tells of it.
            audit: the result of `ah.audit` on this model, or its folder; the card shows its scores and its flags.
            license: its identifier, such as apache-2.0.
            private: whether a new repository is private; None is your default on the Hub.
            token: a token, or None for the one of `hf auth login` or HF_TOKEN.
            commit_message: the message of the commit.
        """
        with tempfile.TemporaryDirectory(prefix="anchorhold-push-") as room:
            prepared(cast("Embedder | Trainable", self), repo, Path(room), run=run, audit=audit, license=license)
            return uploaded(Path(room), repo, private=private, token=token, message=commit_message)


def repository(repo: str) -> HubName:
    """The repository to upload to: owner/name, with or without hf: before it."""
    name = HubName.parse(f"hf:{str(repo).removeprefix('hf:')}")
    check(not name.revision and not name.file, f"{repo}: give owner/name alone; a push goes to the main branch")
    return name


def prepared(
    model: "Embedder | Trainable | str | Path",
    repo: str,
    folder: Path,
    *,
    run: Run | str | Path | None = None,
    audit: Audited | str | Path | None = None,
    license: str = "",
) -> list[Path]:
    """Write the files of a repository into a folder: the model, its card, and run.json if there is a run."""
    name, folder = repository(repo), folder.expanduser()
    others = {each.name for each in folder.iterdir()} - _FILES if folder.is_dir() else set()
    check(not others, f"{folder} holds other files ({', '.join(sorted(others)[:3])}); give a new folder")
    source = _file(model) if isinstance(model, str | Path) else None
    itself = source is not None and source.parent.resolve() == folder.resolve()
    check(not itself, f"{folder} is the folder of the model itself; give a new folder")
    if source is not None and run is None and source.name == EXPORT and (source.parent / "run.json").is_file():
        run = source.parent
    info, facts = info_of(run), facts_of(audit)
    config, mark = _described(model, source, info)
    _check_same(mark, info, facts)
    card = card_text(without_paths(config), info, facts, name.repo, license)  # refuses before anything is written
    target = folder / EXPORT
    with atomic(target) as temporary:
        if source is None:
            cast("Embedder | Trainable", model).save(temporary)
        else:
            shutil.copyfile(source, temporary)
        _refuse_paths(temporary)
    texts = {"README.md": card}
    if info:
        info |= {"export": digest(target), "weights": mark or dig(info, "weights")}
        texts["run.json"] = json.dumps(without_nan(info), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    else:
        (folder / "run.json").unlink(missing_ok=True)  # of what was written there before
    for file, text in texts.items():
        with atomic(folder / file) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return [target, *(folder / file for file in texts)]


def uploaded(folder: Path, repo: str, *, private: bool | None, token: str | bool | None, message: str) -> str:
    """Upload the files of `prepared` in one commit; returns hf:owner/name@commit."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    name = repository(repo)
    api = HfApi(token=token, **ABOUT)
    try:
        with plain_progress():
            try:
                # The first question has a time limit, which the others lack.
                there = api.model_info(name.repo, timeout=PATIENCE)
            except RepositoryNotFoundError:
                api.create_repo(name.repo, private=private, exist_ok=True)
                there = api.model_info(name.repo, timeout=PATIENCE)
            if private and not there.private:
                raise ModelError(f"hf:{name.repo} exists and is public; make it private on the Hub, or choose another")
            done = api.create_commit(
                name.repo,
                [CommitOperationAdd(path.name, path) for path in sorted(folder.iterdir()) if path.name in _FILES],
                commit_message=message or f"Model saved by anchorhold {__version__}",
            )
    except ModelError:
        raise
    except Exception as error:  # the network may raise anything
        if lacks_memory(error):
            raise
        raise _refused(name, error) from None
    return f"hf:{name.repo}@{done.oid}"


def _refused(name: HubName, error: Exception) -> ModelError:
    """The one-line error of an upload."""
    from huggingface_hub.errors import LocalTokenNotFoundError, RepositoryNotFoundError

    status = getattr(getattr(error, "response", None), "status_code", None)
    login = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"
    if isinstance(error, LocalTokenNotFoundError) or status == 401 or isinstance(error, RepositoryNotFoundError):
        return ModelError(f"hf:{name.repo}: the Hub does not know you; {login}")
    if status == 403:
        return ModelError(f"hf:{name.repo}: your token may not write there; check the owner's name, or {login}")
    if isinstance(error, ValueError) and status is None:
        reason = shown(" ".join(str(error).split()))[:200]
        return ModelError(f"hf:{name.repo}: the Hub refuses the model card ({reason}); check the licence")
    return refusal(name, error)


def _file(model: str | Path) -> Path:
    """The model file of a path or a run folder, checked for damage."""
    path = Path(model).expanduser()
    path = path / EXPORT if path.is_dir() else path
    if not path.is_file():
        raise ModelError(f"no model at {path}; give a .safetensors file or a finished run folder")
    check_model(path)
    return path


def _described(model: Any, source: Path | None, info: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The settings of a model, and the hash of its weights where it can be known."""
    from .embedder import load_embedder
    from .wrap import fingerprint_of

    if source is None:
        return dict(model.config), fingerprint_of(model)
    try:
        with safetensors.safe_open(source, "pt") as file:
            config = dig(parsed((file.metadata() or {})[METADATA]), "config")
    except (safetensors.SafetensorError, OSError, KeyError, ValueError):
        config = None
    if not isinstance(config, dict):
        raise ModelError(f"{source} was not saved by Anchorhold; load its weights into an Embedder and push that")
    if "module" in config:  # only its author has the code; run.json knows the hash
        mark = dig(info, "weights")
        return config, mark if isinstance(mark, str) else None
    return config, fingerprint_of(load_embedder(source))


def _check_same(mark: str | None, info: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Refuse a run or an audit of another model: the card would show its numbers for this one."""
    trained, audited = dig(info, "weights"), dig(facts, "model", "weights")
    if trained is not None and mark is not None and trained != mark:
        raise RunError(f"the run trained other weights ({trained}) than this model has ({mark}); give its own run")
    if facts and mark is None:
        raise RunError("without its run nothing tells whether the audit is of this model; push the run folder")
    if facts and audited != mark:
        raise RunError(f"the audit is of another model ({audited}) than this one ({mark}); audit the model you push")


def _refuse_paths(path: Path) -> None:
    """Refuse a model whose record contains a path; a sealed file cannot be changed."""
    with safetensors.safe_open(path, "pt") as file:
        known = parsed((file.metadata() or {})[METADATA])
    if without_paths(known) != known:
        raise ModelError(
            "the record in the model file contains a path of your machine; rename its settings, and save again"
        )
