"""The model card: what a model's page on the Hub says, written from its run and its audit.

It says where the numbers come from, which doubts the audit raised, and what the numbers do not show.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from ..columns import NOT_PERCENT, length, radius
from ..console import shown
from ..errors import RunError, SettingsError
from ..runs.audits import attack_in_words, read_audit
from ..runs.fields import dig, number
from ..runs.folder import Run
from ..runs.summary import summary_of, without_paths
from .hub import HubName

__all__ = ["Audited", "card_text", "facts_of", "info_of", "model_card"]

TASK = "image-feature-extraction"
_TAGS = ["image-retrieval", "metric-learning", "adversarial-robustness", TASK]
_UNDER = ("ES:R", "LTM", "GTM", "margin")  # columns that are R@1 under attack; in a strong audit they are the same
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~$&])")
_BASE = re.compile(r"hf:([\w.-]+/[\w.-]+)@", re.ASCII)


class Audited(Protocol):
    """The result of `ah.audit`."""

    def to_dict(self) -> dict[str, Any]: ...


def model_card(
    run: Run | str | Path | None, audit: Audited | str | Path | None = None, *, name: str = "", license: str = ""
) -> str:
    """The model card of a run and its audit, as the text of README.md.

    Args:
        run: the run folder.
        audit: the result of `ah.audit` on this run's model, or its folder; without one the card says so.
        name: owner/name on the Hub.
        license: its identifier, such as apache-2.0.

    >>> model_card(None, name="me/birds").splitlines()[:2]
    ['---', 'library_name: anchorhold']
    """
    info, facts = info_of(run), facts_of(audit)
    marks = [dig(info, "weights"), dig(facts, "model", "weights")]
    if None not in marks and marks[0] != marks[1]:
        raise RunError(
            f"the audit is of another model ({marks[1]}) than the run's ({marks[0]}); give the run's own audit"
        )
    config = _table(dig(info, "model", "config") or dig(facts, "model", "config"))
    repo = HubName.parse(f"hf:{name.removeprefix('hf:')}").repo if name else ""
    return card_text(config, info, facts, repo, license)


def info_of(run: Run | str | Path | None) -> dict[str, Any]:
    """The part of run.json that may be published; empty without a run."""
    return {} if run is None else summary_of((run if isinstance(run, Run) else Run(run)).read_json())


def facts_of(audit: Audited | str | Path | None) -> dict[str, Any]:
    """The content of audit.json, without paths; empty without an audit."""
    if audit is None:
        return {}
    if isinstance(audit, str | Path):
        folder = Path(audit).expanduser()
        found = read_audit(folder.parent if folder.name == "audit.json" else folder)
    else:
        found = audit.to_dict()
    return dict(without_paths(found))


def card_text(
    config: Mapping[str, Any], info: Mapping[str, Any], facts: Mapping[str, Any], repo: str, license: str
) -> str:
    """The card: metadata that the Hub reads, then text for people."""
    from huggingface_hub import ModelCardData

    if license and not re.fullmatch(r"[\w.+-]+", license, re.ASCII):
        raise SettingsError(f"license {license!r}: give its identifier on the Hub, such as apache-2.0 or mit")
    title = repo.partition("/")[2] or "model"
    start = str(dig(info, "model", "hub") or dig(info, "model", "weights", "source") or "")
    results = list(_results(info, facts))
    data = ModelCardData(
        library_name="anchorhold",
        pipeline_tag=TASK,
        license=license or None,
        base_model=base[1] if (base := _BASE.match(start)) else None,
        tags=list(_TAGS),
        model_name=title,
        eval_results=results or None,
    )
    if not results:
        del data.model_name
    parts = [f"# {_text(title)}", _about(config), _use(config, repo), _scores(info, facts), _flags(facts)]
    parts += [_training(config, info), _limits(facts)]
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


# ---------------------------------------------------------------- metadata


def _results(info: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[Any]:
    """The numbers for the Hub's model index."""
    from huggingface_hub import EvalResult

    def result(kind: str, name: str, value: float | None, **args: str) -> Iterator[Any]:
        if value is not None:
            data = _data_name(info, facts)
            yield EvalResult(
                task_type=TASK,
                task_name="Image retrieval",
                dataset_type=re.sub(r"[^\w.-]+", "-", data.partition("/")[0], flags=re.ASCII).strip("-.") or "images",
                dataset_name=data,
                metric_type=kind,
                metric_name=name,
                metric_value=round(value, 2),
                metric_args=args or None,
            )

    clean = number(dig(facts, "clean", "R@1", "value")) if facts else number(dig(info, "final", "r1"))
    yield from result("recall_at_1", "R@1, no attack", clean)
    eps = number(dig(facts, "settings", "eps"))
    if eps is None:
        return
    norm = str(dig(facts, "settings", "norm") or "linf")
    threat = {"eps": length(eps, norm), "norm": norm}
    for protocol, outcome in _table(dig(facts, "protocols")).items():
        yield from result(
            "ers", f"ERS, {shown(protocol)}", _value(dig(outcome, "ers")), protocol=shown(protocol), **threat
        )
    yield from result("recall_at_1", "R@1, strong attack", _value(_strong(facts)), protocol="strong", **threat)


def _data_name(info: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The name of the images behind the numbers, on one line."""
    trained = dig(info, "data", "name")
    name = dig(facts, "data", "query", "name") or (f"{trained}/test" if trained else "") or "images"
    return shown(str(name))


def _strong(facts: Mapping[str, Any]) -> Any:
    """R@1 under the strong attack; None without a strong audit of it."""
    columns = dig(facts, "protocols", "strong", "columns")
    return next((dig(columns, name) for name in _UNDER if _value(dig(columns, name)) is not None), None)


# ---------------------------------------------------------------- text


def _about(config: Mapping[str, Any]) -> str:
    own = config.get("module")
    made = f"a module of its author's own, {_text(own)}" if own else f"{_text(config.get('backbone') or 'unknown')}"
    dim = number(config.get("dim"))
    vectors = f"unit vectors of {dim:.0f} numbers" if dim else "unit vectors"
    colours = "RGB" if config.get("channels", 3) == 3 else f"{_text(config['channels'])}-channel"
    return (
        f"An image embedding model for retrieval, made with Anchorhold. It maps {colours} images in [0, 1] to "
        f"{vectors}; near vectors mean similar images. Backbone: {made}."
    )


def _use(config: Mapping[str, Any], repo: str) -> str:
    name = f"hf:{repo or 'owner/name'}"
    own = ", module=net" if config.get("module") else ""
    lines = ["## Use", "", "```python", "import anchorhold as ah", ""]
    lines += [f'model = ah.load("{name}"{own})  # @commit after the name pins it']
    lines += ['vectors = model(model.preprocess("photo.jpg")[None])', "```"]
    if own:
        lines += [
            "",
            f"`net` is the module whose weights these are: {_text(config['module'])}. The file holds no code.",
        ]
    return "\n".join(lines)


def _scores(info: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    name = _text(_data_name(info, facts))
    if not facts:
        r1 = number(dig(info, "final", "r1"))
        told = f" Training measured R@1 {r1:.1f} on {name}, without an attack." if r1 is not None else ""
        return f"## Scores\n\nThis model has not been audited.{told} Nothing here says how robust it is."
    protocols = dig(facts, "protocols")
    settings, data = dig(facts, "settings"), dig(facts, "data")
    counts = [_numbered(data.get(key)) for key in ("attacked", "images")]
    asked, queries = (number(each.get(0)) for each in counts)
    gallery = number(counts[1].get(1))
    lines = ["## Scores", ""]
    lines += [
        f"- Images: {name}. {_of(asked, queries)} queries were attacked; the gallery has {_count(gallery)} images."
    ]
    lines += [f"- Attacked: {_text(data['part'])}."] if data.get("part") else []
    lines += [f"- Attack: {_text(attack_in_words(settings))}. ε is in units of the pixel range from 0 to 1."]
    lines += [f"- R@1 without an attack: {_cell(dig(facts, 'clean', 'R@1'))} %."]
    if (strong := _strong(facts)) is not None:
        before = number(dig(strong, "initial"))
        same = "" if before is None else f"; {before:.1f} % of the same queries without it"
        lines += [f"- R@1 under the strong attack: {_cell(strong)} %{same}."]
        lines += ["- `strong` is the worst result of several attacks on each query."]
    lines += ["", "[low, high] are 95 % intervals over queries. Numbers are in percent, but TMA is a cosine and ES:D a"]
    lines += ["distance. ERS is the papers' score over these attacks, from 0 to 100; more is better.", ""]
    names = dict.fromkeys(each for p in protocols for each in _table(dig(protocols, p, "columns")))
    lines += ["| | " + " | ".join(_text(p) for p in protocols) + " |", "|---|" + "---|" * len(protocols)]
    rows = {"**ERS**": [dig(protocols, p, "ers") for p in protocols]}
    rows |= {_text(each): [dig(protocols, p, "columns", each) for p in protocols] for each in names}
    for head, row in rows.items():
        digits = 3 if head in NOT_PERCENT else 1
        lines += [f"| {head} | " + " | ".join(_cell(each, digits) for each in row) + " |"]
    return "\n".join(lines)


def _flags(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    flags = [each for each in _numbered(facts.get("flags")).values() if isinstance(each, Mapping)]
    if not flags:
        return "## Doubts\n\nThe audit raised no flag."
    lines = [f"- **{_text(flag.get('name'))}**: {_text(flag.get('message'))}" for flag in flags]
    return "## Doubts\n\nThe audit raised flags. Each is a reason to doubt the numbers above.\n\n" + "\n".join(lines)


def _training(config: Mapping[str, Any], info: Mapping[str, Any]) -> str:
    if not info:
        return ""
    settings, versions = info.get("settings"), _table(info.get("versions"))
    images, start = _numbered(dig(info, "data", "images")), _table(dig(info, "model", "weights"))
    epochs = number(dig(info, "final", "epoch"))
    mark = f" (SHA-256 {start.get('sha256')}…)" if dig(start, "sha256") else ""
    rows = {
        "Recipe": dig(settings, "recipe"),
        "Defence": dig(settings, "defence", "name"),
        "ε in training": None if (eps := number(dig(settings, "defence", "eps"))) is None else _radius(eps, settings),
        "Images": f"{dig(info, 'data', 'name')}, {_count(number(images.get(0)))} for training",
        "Initial weights": f"{start['source']}{mark}" if dig(start, "source") else None,
        "Initial model": dig(info, "model", "hub"),
        "Epochs": None if epochs is None else f"{epochs:.0f}",
        "Seed": dig(settings, "train", "seed"),
        "Published row": info.get("row") or None,
        "Preprocessing": ", ".join(f"{key} {value}" for key, value in _table(config.get("preprocessing")).items()),
        "Versions": ", ".join(f"{key} {value}" for key, value in versions.items()),
        "Commit of Anchorhold": info.get("commit"),
        "Ended as": info.get("status") if info.get("status") != "done" else None,
    }
    lines = [f"- {name}: {_text(value)}" for name, value in rows.items() if value not in (None, "")]
    return "## Training\n\n" + "\n".join(lines) + "\n\n`run.json` has all settings and numbers."


def _limits(facts: Mapping[str, Any]) -> str:
    lines = ["## What this does not show", ""]
    if facts:
        strong = dig(facts, "protocols", "strong") is not None
        lines += ["- The numbers hold for these attacks, this norm and this ε. Other attacks may do more harm."]
        lines += [] if strong else ["- No strong audit was made. A stronger attack may lower these numbers a lot."]
        if dig(facts, "protocols", "published") is not None:
            lines += ["- `published` repeats the evaluation of the papers, its defects included. `corrected` does what"]
            lines += ["  they describe. Compare `published` only with numbers of papers."]
        lines += ["- The intervals are over queries. They do not cover other training seeds or other images."]
    lines += ["- Nothing here is a guarantee: no bound on the worst case was proved."]
    lines += ["- Other images, other classes or another preprocessing can give other results."]
    return "\n".join(lines)


def _value(column: Any) -> float | None:
    return number(dig(column, "value"))


def _cell(column: Any, digits: int = 1) -> str:
    value, low, high = (number(dig(column, key)) for key in ("value", "low", "high"))
    span = "" if low is None or high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return "–" if value is None else f"{value:.{digits}f}{span}"


def _numbered(value: Any) -> dict[int, Any]:
    """The items of a list by their place; none if the record holds something else."""
    return dict(enumerate(value)) if isinstance(value, list) else {}


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(value: float | None) -> str:
    return "an unknown number of" if value is None else f"{value:,.0f}"


def _of(part: float | None, whole: float | None) -> str:
    return _count(part) if part == whole or whole is None else f"{_count(part)} of {whole:,.0f}"


def _text(value: Any) -> str:
    """A value as plain text on one line: names may contain anything, and Markdown must not run it."""
    return _MARKDOWN.sub(r"\\\1", shown(str(value))[:500])


def _radius(eps: float, settings: Any) -> str:
    return radius(eps, str(dig(settings, "defence", "norm") or "linf")).removeprefix("ε ")
