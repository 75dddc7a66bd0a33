"""The commands audit and attack."""

from pathlib import Path
from shlex import join
from typing import Annotated, Any

import typer

from .app import (
    Alpha,
    Classes,
    Crop,
    Data,
    Device,
    Eps,
    HeldOut,
    Mean,
    Method,
    Model,
    Norm,
    Resize,
    Root,
    Size,
    Std,
    Steps,
    ThreatName,
    app,
    model_of,
    number,
    numbers,
    threat_options,
)


@app.command(example="anchorhold audit runs/digits --data digits --limit 100")
def audit(
    model: Model,
    data: Data,
    root: Root = None,
    protocol: Annotated[str, typer.Option(help="both, published (as in the papers) or corrected")] = "both",
    attacks: Annotated[
        str, typer.Option(help="Attacks to run, e.g. CA+,ES or CA+:w=5,QA-:m=2; default: the nine of ERS")
    ] = "",
    limit: Annotated[int, typer.Option(help="Number of images to attack, sampled over all classes")] = 1000,
    full: Annotated[bool, typer.Option("--full", help="Attack all images")] = False,
    threat: ThreatName = "standard",
    eps: Eps = "",
    norm: Norm = "linf",
    alpha: Alpha = "",
    steps: Steps = None,
    method: Method = "pgd",
    strength: Annotated[
        str, typer.Option(help="standard, or strong: an ensemble of attacks for every goal")
    ] = "standard",
    surrogate: Annotated[str, typer.Option(help="Second model for transfer attacks; needs --strength strong")] = "",
    surrogate_mean: Annotated[
        str, typer.Option(help="Channel means of the surrogate; default: its own, else --mean")
    ] = "",
    surrogate_std: Annotated[str, typer.Option(help="Channel standard deviations of the surrogate")] = "",
    curve: Annotated[
        str,
        typer.Option(
            help="Measure R@1 under the strong attack at these ε, e.g. 2/255,8/255, or none; default: four up to --eps"
        ),
    ] = "",
    until: Annotated[float | None, typer.Option(help="Add queries until the interval of ERS is ±N points")] = None,
    mean: Mean = "",
    std: Std = "",
    size: Size = "",
    resize: Resize = None,
    crop: Crop = None,
    on_bad_image: Annotated[str, typer.Option(help="Unreadable images: fail or skip")] = "fail",
    held_out: HeldOut = 0,
    classes: Classes = "unseen",
    seed: Annotated[int, typer.Option(help="Seed of the sample, the targets and the random starts")] = 0,
    seeds: Annotated[int, typer.Option(help="Repeat with N random starts and report mean ± std")] = 1,
    batch: Annotated[int, typer.Option(help="Images per batch")] = 128,
    precision: Annotated[
        str, typer.Option(help="Precision of the attack steps: auto (bf16 on a GPU), fp32 or bf16")
    ] = "auto",
    compile: Annotated[
        str, typer.Option(help="Compile the attack steps: auto (on a GPU, for long audits), on or off")
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Output folder; default: audits/MODEL-DATA; give the same one to resume")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace another audit in --out")] = False,
    device: Device = "auto",
) -> None:
    """Measure how robust a model is, and write a report page.

    You get retrieval accuracy without attack, R@1 against the size of the attack, and the papers' attacks and scores.
    """
    from ..auditing.run import audit as run_audit
    from ..auditing.sample_size import check_until
    from ..console import Console
    from ..interface import recording
    from .strong import print_tables, second_model

    chosen = _attacks(attacks)
    check_until(until, chosen)
    protocols = ("published", "corrected") if protocol == "both" else (protocol,)
    victim = model_of(model, mean, std, size)
    out = out or Path("audits") / f"{_slug(model)}-{_slug(data)}{apart(held_out, classes)}"
    typed = {
        "model": model,
        "data": data,
        "root": root,
        "held-out": held_out,
        "mean": mean,
        "std": std,
        "size": size,
        "on-bad-image": on_bad_image if on_bad_image != "fail" else "",
        "surrogate": surrogate,
        "surrogate-mean": surrogate_mean,
        "surrogate-std": surrogate_std,
    }
    with recording(typed):
        found = run_audit(
            victim,
            _data(data, root, held_out),
            protocols=protocols,
            attacks=chosen,
            limit=0 if full else limit,
            **threat_options(threat, eps, norm, alpha, steps),
            method=method,  # type: ignore[arg-type]  # checked by the callee
            strength=strength,  # type: ignore[arg-type]
            surrogate=second_model(surrogate, (surrogate_mean, surrogate_std), (mean, std), size)
            if surrogate
            else None,
            epsilons=() if curve == "none" else numbers("--curve", curve) or None,
            until=until,
            seed=seed,
            seeds=seeds,
            batch=batch,
            device=device,
            precision=precision,  # type: ignore[arg-type]
            compile=compile,  # type: ignore[arg-type]
            out=out,
            replace=replace,
            resize=resize,
            crop=crop,
            on_bad_image=on_bad_image,  # type: ignore[arg-type]
            classes=classes,  # type: ignore[arg-type]
            report=Console(),
        )
    print(found)
    print_tables(found.to_dict())
    print(f"\nwritten: {out / 'audit.json'}, samples.safetensors and examples.safetensors beside it")
    print(f"report page: {out / 'page.html'}")
    if strength == "strong":
        words = [str(out), "--model", model, "--data", data, *(("--root", str(root)) if root is not None else ())]
        words += [*(("--held-out", str(held_out)) if held_out else ())]
        words += [word for name in chosen or () if ":" in name for word in ("--allow", name)]
        print(f"receipts: {out / 'receipts'}; to check: `anchorhold verify {join(words)}`")


@app.command(example="anchorhold attack runs/digits 0 --data digits --goal ES")
def attack(
    model: Model,
    image: Annotated[str, typer.Argument(help="Image file, or the number of an image in the data")],
    data: Data,
    goal: Annotated[str, typer.Option(help="CA+, CA-, QA+, QA-, TMA, ES, LTM, GTM, GTT, nearest, margin, …")] = "ES",
    root: Root = None,
    protocol: Annotated[str, typer.Option(help="published (as in the papers) or corrected")] = "corrected",
    class_: Annotated[str, typer.Option("--class", help="Class of an image file that is not in the data")] = "",
    threat: ThreatName = "standard",
    eps: Eps = "",
    norm: Norm = "linf",
    alpha: Alpha = "",
    steps: Steps = None,
    method: Method = "pgd",
    mean: Mean = "",
    std: Std = "",
    size: Size = "",
    resize: Resize = None,
    crop: Crop = None,
    held_out: HeldOut = 0,
    seed: Annotated[int, typer.Option(help="Seed of the targets and the random starts")] = 0,
    smallest: Annotated[
        bool,
        typer.Option(
            "--smallest", help="Search for the smallest ε that succeeds, up to --eps (64/255 if you give none)"
        ),
    ] = False,
    searches: Annotated[int, typer.Option(help="With --smallest: number of halvings in the search for ε")] = 10,
    save: Annotated[Path | None, typer.Option(help="Save the perturbed image to this PNG file")] = None,
    device: Device = "auto",
) -> None:
    """Attack one image, and show which images the model finds for it before and after."""
    from ..auditing.one_image import attack as attack_one
    from ..auditing.smallest import SmallestPerturbation, smallest_perturbation
    from ..console import Console
    from ..errors import check

    check(
        save is None or save.suffix.lower() == ".png",
        "--save needs a .png file: lossy formats destroy the perturbation",
    )
    check(smallest or searches == 10, "--searches belongs to --smallest: add it, or leave --searches out")
    how: dict[str, Any] = {
        "protocol": protocol,
        "label": class_,
        **threat_options(threat, eps, norm, alpha, steps),
        "method": method,
        "seed": seed,
        "device": device,
        "resize": resize,
        "crop": crop,
        "report": Console(),
    }
    if smallest:
        how["searches"] = searches
    run: Any = smallest_perturbation if smallest else attack_one
    done = run(model_of(model, mean, std, size), image, _data(data, root, held_out), goal, **how)
    print(done)
    if isinstance(done, SmallestPerturbation) and not done.found:
        return
    if save is not None:
        print(f"\nperturbed image: {done.save(save)}")


def _attacks(text: str) -> dict[str, dict[str, Any]] | None:
    """`CA+:w=5,ES` as names with their settings; None for empty text."""
    from ..attacks.settings import ATTACK_NAMES
    from ..errors import check

    chosen: dict[str, dict[str, Any]] = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        name, *changes = each.split(":")
        if name not in ATTACK_NAMES and changes and "=" not in changes[0]:  # module:thing of yours
            name, changes = f"{name}:{changes[0]}", changes[1:]
        # ES:D and ES:R are columns of one attack; their letter is not a setting.
        check(all("=" in change for change in changes), f"--attacks {each}: write settings as NAME=VALUE, e.g. CA+:w=5")
        pairs = (change.split("=", 1) for change in changes)
        chosen[name] = {key: int(value) if value.isdigit() else number(f"{name}:{key}", value) for key, value in pairs}
    check(bool(chosen) or not text, f"--attacks {text} names no attack; give some, e.g. CA+,ES, or leave it out")
    return chosen or None


def _data(name: str, root: Path | None, held_out: int = 0) -> Any:
    from ..auditing.classes import audited_data
    from ..errors import check

    check(held_out >= 0, f"--held-out {held_out}: give the number of training classes to evaluate on, 2 or more")
    return audited_data(name, root, held_out)


def apart(held_out: int, classes: str) -> str:
    """Suffix of the default output folder, so that audits of different classes do not share one."""
    return f"-held-out-{held_out}" if held_out else "-all-classes" if classes == "all" else ""


def _slug(text: str) -> str:
    """A folder name from a model or data argument; a model in a run folder is named after that folder."""
    library, _, name = text.partition(":")
    path = Path(name.replace("/", "-") if library == "open_clip" else text)
    path = path.parent if path.name == "model.safetensors" else path
    return path.name.removesuffix(".safetensors").replace(":", "-").replace("=", "-") or "here"
