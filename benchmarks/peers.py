"""Does an attack off the shelf beat the strong audit? Verdicts query by query, as JSON.

    pip install foolbox torchattacks adv-lib pyautoattack            # the peers: none is a dependency
    python benchmarks/peers.py --out peers.json                      # digits, natural and HM, Linf and L2
    python benchmarks/peers.py --models runs/mine --threats linf:0.06 --limit 200 --only mine,torchattacks

For each model and threat the strong audit attacks R@1. Then every peer attacks the queries that were right when clean
and that the audit left right. A peer sees a classifier: the score of a class is minus the distance to its nearest item,
without the query itself. It gets at least as many image-steps for a query as the audit spends on one that withstands.
Momentum PGD of 500 steps with three starts, on the margin and on cross-entropy, is written out here. A query is turned
if the peer's image, projected into the ball, has a wrong nearest neighbour in fp32.

`--mask` puts something in front of or behind the model that hides its gradients. What each member of the ensemble
finds is measured by `members.py`.
"""

import argparse
import contextlib
import io
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anchorhold as ah
from anchorhold.attacks.goal import Scene
from anchorhold.attacks.menu import goal_named
from anchorhold.attacks.recall import MarginAttack
from anchorhold.auditing.members import most_steps
from anchorhold.config.recipes import settings_from
from anchorhold.console import Silent
from anchorhold.data.datasets import dataset
from anchorhold.data.images import load_images
from anchorhold.device import computer_of
from anchorhold.model.frozen import embed_all, frozen
from anchorhold.perturb.ball import Ball
from anchorhold.random import Key
from anchorhold.runs.provenance import provenance

Found = dict[str, Any]
Step = Callable[[Tensor], Tensor]
THREATS = "linf:0.03,linf:0.06,linf:0.1,l2:0.25,l2:0.5"
PEERS = ("foolbox", "torchattacks", "adv-lib", "pyautoattack")
SCALE = 10.0  # of the scores: cross-entropy over plain distances would be flat


class Classifier(nn.Module):
    """Scores of all classes for images near known queries, as the peers want them."""

    def __init__(self, embed: Callable[[Tensor], Tensor], scene: Scene, images: Tensor) -> None:
        super().__init__()
        self.embed, self.scene = embed, scene
        self.classes, self.places = scene.gallery_labels.unique(return_inverse=True)
        self.register_buffer("known", images.flatten(1))
        self.one = nn.Parameter(torch.ones(()))  # some peers ask a model's parameters for its device

    def whose(self, images: Tensor) -> Tensor:
        """Which query an image was made from: the nearest in pixels. Peers reorder and repeat their batches."""
        return torch.cdist(images.detach().flatten(1), self.get_buffer("known")).argmin(1)

    def forward(self, images: Tensor) -> Tensor:
        away = torch.cdist(self.embed(images), self.scene.gallery)
        own = self.scene.own[self.whose(images)][:, None] == torch.arange(away.shape[1], device=away.device)
        away = away.masked_fill(own, 4.0)  # no distance of unit vectors exceeds 2
        start = away.new_full((len(away), len(self.classes)), 4.0)
        near = start.scatter_reduce(1, self.places.expand_as(away), away, "amin", include_self=False)
        return -SCALE * self.one * near

    def labels(self, ids: Tensor) -> Tensor:
        return torch.searchsorted(self.classes, self.scene.labels[ids])


class Masked(nn.Module):
    """A model with something in front of it or behind it that hides gradients."""

    def __init__(self, model: nn.Module, before: Step, after: Step) -> None:
        super().__init__()
        self.model, self.before, self.after = model, before, after

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.after(self.model(self.before(images))), dim=1)


MASKS: dict[str, tuple[Step, Step]] = {
    "rounded": (lambda x: (16 * x).round() / 16, lambda e: e),  # no gradient at all
    "steep": (lambda x: torch.sigmoid(40 * (x - 0.5)), lambda e: e),  # vanishing for most pixels
    "saturated": (lambda x: x, lambda e: torch.tanh(60 * e)),  # small for most coordinates
    "signs": (lambda x: x, lambda e: torch.tanh(1000 * e)),  # zero in fp32 for most coordinates
    "quantised": (lambda x: x, lambda e: (8 * e).round() / 8),  # zero everywhere
}


@dataclass(frozen=True)
class Case:
    """Queries to attack under a threat."""

    model: Classifier
    images: Tensor
    labels: Tensor
    ball: Ball
    steps: int  # image-steps that the audit spends on a query that withstands

    @property
    def norm(self) -> str:
        return "Linf" if self.ball.norm == "linf" else "L2"

    def restarts(self, steps: int) -> int:
        return -(-self.steps // steps)


Attack = Callable[[Case], Tensor | list[Tensor]]


class OtherNorm(Exception):
    """The attack does not know this norm."""


# ---------------------------------------------------------------- attacks


def momentum(loss: str) -> Attack:
    """Momentum PGD (Dong et al., CVPR 2018): 500 steps, three random starts."""

    def run(case: Case) -> list[Tensor]:
        found, (eps, linf) = [], (case.ball.eps, case.ball.norm == "linf")
        for start in range(3):
            places = torch.arange(len(case.images), device=case.images.device)
            x = case.ball.start(case.images[:, None], Key.of(start)("momentum"), places)[:, 0]
            mean = torch.zeros_like(x)
            best, level = x.clone(), x.new_full((len(x),), -torch.inf)
            for step in range(500):
                x = x.detach().requires_grad_()
                scores = case.model(x)
                right = scores.gather(1, case.labels[:, None])[:, 0]
                margin = scores.scatter(1, case.labels[:, None], -torch.inf).amax(1) - right
                value = margin if loss == "margin" else F.cross_entropy(scores, case.labels, reduction="none")
                (slope,) = torch.autograd.grad(value.sum(), x)
                with torch.no_grad():
                    better = margin > level
                    best[better], level[better] = x.detach()[better], margin.detach()[better]
                    mean = mean + slope / slope.abs().flatten(1).mean(1).clamp(min=1e-20).reshape(-1, 1, 1, 1)
                    length = 2 * eps * (1 - step / 500) / 10
                    way = mean.sign() if linf else mean / mean.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
                    x = case.ball.project((x + length * way)[:, None], case.images[:, None])[:, 0]
            found.append(best)
        return found

    return run


def own_attacks() -> Iterator[tuple[str, str, Attack]]:
    yield "mine", "momentum 500 x 3, margin", momentum("margin")
    yield "mine", "momentum 500 x 3, cross-entropy", momentum("ce")


def of_foolbox() -> Iterator[tuple[str, str, Attack]]:
    import foolbox as fb

    def run(kind: str, **settings: Any) -> Attack:
        def attack(case: Case) -> list[Tensor]:
            many = case.restarts(settings.get("steps", 50))
            made = getattr(fb.attacks, kind.format(norm=case.norm))(**settings)
            model = fb.PyTorchModel(case.model.eval(), bounds=(0, 1), device=case.images.device)
            found = []
            for start in range(many):
                torch.manual_seed(start)
                _, clipped, _ = made(model, case.images, case.labels, epsilons=case.ball.eps)
                found.append(clipped)
            return found

        return attack

    yield "foolbox", "{norm}PGD 100", run("{norm}PGD", steps=100)
    yield "foolbox", "{norm}AdamPGD 100", run("{norm}AdamPGD", steps=100)
    yield (
        "foolbox",
        "{norm}MomentumIterative 100",
        run("{norm}MomentumIterativeFastGradientMethod", steps=100, random_start=True),
    )


def of_torchattacks() -> Iterator[tuple[str, str, Attack]]:
    import torchattacks as ta

    def run(make: Callable[[Case], Any], steps: int, only: str = "") -> Attack:
        def attack(case: Case) -> list[Tensor]:
            if only and case.norm != only:
                raise OtherNorm(f"{only} alone")
            found = []
            for start in range(case.restarts(steps)):
                torch.manual_seed(start)
                made = make(case)
                if hasattr(made, "seed"):
                    made.seed = start
                found.append(made(case.images, case.labels).detach())
            return found

        return attack

    yield "torchattacks", "APGD ce 100", run(lambda c: ta.APGD(c.model, c.norm, c.ball.eps, steps=100, loss="ce"), 100)
    yield (
        "torchattacks",
        "APGD dlr 100",
        run(lambda c: ta.APGD(c.model, c.norm, c.ball.eps, steps=100, loss="dlr"), 100),
    )
    yield (
        "torchattacks",
        "PGD 100",
        run(lambda c: ta.PGD(c.model, c.ball.eps, c.ball.eps / 10, 100, random_start=True), 100, "Linf"),
    )
    yield (
        "torchattacks",
        "PGDL2 100",
        run(lambda c: ta.PGDL2(c.model, c.ball.eps, c.ball.eps / 10, 100, random_start=True), 100, "L2"),
    )
    yield "torchattacks", "MIFGSM 100", run(lambda c: ta.MIFGSM(c.model, c.ball.eps, c.ball.eps / 20, 100), 100, "Linf")
    yield (
        "torchattacks",
        "VMIFGSM 40",
        run(lambda c: ta.VMIFGSM(c.model, c.ball.eps, c.ball.eps / 10, 40, N=4), 200, "Linf"),
    )


def of_adv_lib() -> Iterator[tuple[str, str, Attack]]:
    import adv_lib.attacks as al
    from adv_lib.attacks.auto_pgd import apgd_targeted

    order = {"Linf": float("inf"), "L2": 2.0}

    def several(steps: int, once: Callable[[Case], Any]) -> Attack:
        def attack(case: Case) -> list[Tensor]:
            found = []
            for start in range(case.restarts(steps)):
                torch.manual_seed(start)
                found.append(once(case))
            return found

        return attack

    def apgd(loss: str) -> Attack:
        def once(case: Case) -> Any:
            eps, norm = case.ball.eps, order[case.norm]
            return al.apgd(case.model, case.images, case.labels, eps, norm, n_iter=100, loss_function=loss)

        return several(100, once)

    yield "adv-lib", "apgd ce 100", apgd("ce")
    yield "adv-lib", "apgd dlr 100", apgd("dlr")
    yield (
        "adv-lib",
        "apgd targeted 100 x 9",
        several(900, lambda c: apgd_targeted(c.model, c.images, c.labels, c.ball.eps, order[c.norm], n_iter=100)),
    )
    yield (
        "adv-lib",
        "fmn 300",
        several(300, lambda c: al.fmn(c.model, c.images, c.labels, order[c.norm], steps=300)),
    )

    def linf(case: Case) -> Any:
        if case.norm != "Linf":
            raise OtherNorm("Linf alone")
        return al.pgd_linf(case.model, case.images, case.labels, case.ball.eps, steps=100, loss_function="dl")

    def ddn(case: Case) -> Any:
        if case.norm != "L2":
            raise OtherNorm("L2 alone")
        return al.ddn(case.model, case.images, case.labels, steps=800, levels=None)

    yield "adv-lib", "pgd margin 100", several(100, linf)
    yield "adv-lib", "ddn 800", several(10**6, ddn)


def of_pyautoattack() -> Iterator[tuple[str, str, Attack]]:
    from pyautoattack import AutoAttack

    def run(attacks: list[str]) -> Attack:
        def attack(case: Case) -> Any:
            made = AutoAttack(
                case.model,
                attacks=attacks,
                eps=case.ball.eps,
                norm=case.norm,
                seed=0,
                version="custom",
                device=str(case.images.device),
            )
            for each in ("apgd_targeted", "fab"):
                getattr(made, each).n_target_classes = len(case.model.classes) - 1
            found = made.run_standard_evaluation(case.images, case.labels, batch_size=250)
            return found[0] if isinstance(found, tuple) else found

        return attack

    yield "pyautoattack", "standard: apgd-ce, apgd-t, fab-t, square", run(["apgd-ce", "apgd-t", "fab-t", "square"])


SOURCES: dict[str, Callable[[], Iterator[tuple[str, str, Attack]]]] = {
    "mine": own_attacks,
    "foolbox": of_foolbox,
    "torchattacks": of_torchattacks,
    "adv-lib": of_adv_lib,
    "pyautoattack": of_pyautoattack,
}


# ---------------------------------------------------------------- measuring


@torch.no_grad()
def turned(case: Case, scene: Scene, ids: Tensor, found: Tensor | list[Tensor]) -> Tensor:
    """Which queries have a wrong neighbour at one of these images, each projected into the ball."""
    wrong = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for images in found if isinstance(found, list) else [found]:
        inside = case.ball.project(images.detach()[:, None], case.images[:, None])[:, 0]
        wrong |= ~MarginAttack().right(scene, ids, embed_all(case.model.embed, [inside])).bool()
    return wrong


def strong_audit(model: nn.Module, ball: Ball, limit: int) -> tuple[Tensor, Tensor, Found]:
    """The queries, which of them the strong audit leaves right, and its cost."""
    begun = time.monotonic()
    threat = ah.Threat(eps=ball.eps, norm=ball.norm)
    found = ah.audit(
        model,
        dataset("digits"),
        attacks=["margin"],
        protocols=["corrected"],
        threat=threat,
        strength="strong",
        limit=limit,
        device=str(next(model.parameters()).device),
        precision="fp32",
        examine=None,
    )
    run = next(each for each in found.runs if each.label == "recall.strong")
    cost = {"seconds": time.monotonic() - begun, "image_steps": run.image_steps}
    return (
        run.ids.cpu(),
        (run.measures["strong"]["margin"] > 0.5).cpu(),
        cost | {"after": (found.strong or {})["after"]},
    )


def compared(model: nn.Module, threats: list[Ball], limit: int, only: list[str]) -> Iterator[Found]:
    """Every threat on one model."""
    data = settings_from("natural", {"data": {"name": "digits"}}).data
    where = next(model.parameters()).device
    test = load_images(dataset("digits").test, data, where, Silent())
    images = torch.cat(list(test.plain(torch.arange(len(test.labels)), 256)))
    with frozen(model) as embed:
        e = embed_all(embed, list(images.split(256)))
        scene = Scene.of(e, test.labels.to(where))
        classifier = Classifier(embed, scene, images).to(where)
        for ball in threats:
            ids, left, cost = strong_audit(model, ball, limit)
            ids, left = ids.to(where), left.to(where)
            right = MarginAttack().right(scene, ids, e[ids]).bool()
            held = ids[left]
            steps = most_steps(goal_named("margin", "corrected")) + 32
            case = Case(classifier, images[held], classifier.labels(held), ball, steps)
            row: Found = {"norm": ball.norm, "eps": ball.eps, "queries": len(ids), "right": int(right.sum())}
            row |= {"strong": {"left": held.tolist(), "steps_at_most": steps, **cost}, "peers": {}, "skipped": {}}
            print(f"{ball.norm} {ball.eps:g}: {row['right']} right, strong leaves {len(held)}", flush=True)
            for source in only:
                row["peers"] |= _peers_of(source, case, scene, held, row)
            yield row


def _peers_of(source: str, case: Case, scene: Scene, held: Tensor, row: Found) -> Found:
    found: Found = {}
    try:
        attacks = list(SOURCES[source]())
    except ImportError as error:
        row["skipped"][source] = f"not installed: {error}"
        print(f"  {source} is not installed ({error}): pip install {source}", flush=True)
        return found
    for _, name, attack in attacks:
        called, begun = f"{source}: {name.format(norm=case.norm)}", time.monotonic()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                made = attack(case) if len(held) else []
        except OtherNorm as error:  # an attack of the other norm
            row["skipped"][called] = str(error)
            continue
        beaten = held[turned(case, scene, held, made)] if len(held) else held
        share = 100 * len(beaten) / max(row["right"], 1)
        found[called] = {"turned": beaten.tolist(), "percent": share, "seconds": time.monotonic() - begun}
        print(f"  {called}: {len(beaten)} turned, {share:.2f} % of the right ones", flush=True)
    return found


def most_turned(models: Mapping[str, list[Found]]) -> Found:
    """The peer that turned the largest share of the queries that were right when clean, under any threat."""
    every = [
        {"percent": one["percent"], "peer": peer, "model": model, "norm": row["norm"], "eps": row["eps"]}
        for model, rows in models.items()
        for row in rows
        for peer, one in row["peers"].items()
    ]
    return max(every, key=lambda one: float(one["percent"]), default={})


def trained(folder: str, asked: str, seed: int) -> Mapping[str, nn.Module]:
    """The models: runs that are given, or natural and HM training on digits."""
    if asked:
        return {each: ah.load(each) for each in asked.split(",")}
    found = {}
    for recipe in ("natural", "hm-lga"):
        run = ah.fit(None, "digits", recipe, f"{folder}/{recipe}", overrides={"train.seed": seed}, device="cpu")
        found[recipe] = ah.load(run.path)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="run folders of models trained on digits, separated by commas")
    parser.add_argument("--threats", default=THREATS, help="NORM:EPS, separated by commas")
    parser.add_argument("--limit", type=int, default=0, help="queries; 0 is all")
    parser.add_argument("--only", default=",".join(SOURCES), help=f"some of {', '.join(SOURCES)}, or '' for none")
    parser.add_argument("--seed", type=int, default=0, help="of the trainings")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu or cuda; the models are trained on the CPU")
    parser.add_argument("--mask", default="", choices=["", *MASKS], help="hide the gradients of the models in this way")
    parser.add_argument("--out", type=Path, help="write the JSON here")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    threats = [Ball(float(eps), norm) for norm, eps in (each.split(":") for each in asked.threats.split(","))]
    only = [each for each in asked.only.split(",") if each]
    if asked.device != "cpu":  # verdicts are fp32
        torch.backends.cudnn.allow_tf32 = False
    versions = {}
    for package in PEERS:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    about = provenance(computer_of(torch.device(asked.device)))
    result: Found = {"schema": "anchorhold.peers/1", **about, "peers": versions, "models": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in trained(folder, asked.models, asked.seed).items():
            name += f" {asked.mask}" if asked.mask else ""
            print(name, flush=True)
            model = Masked(model, *MASKS[asked.mask]).eval() if asked.mask else model
            result["models"][Path(name).name] = []
            for row in compared(model.to(asked.device), threats, asked.limit, only):
                result["models"][Path(name).name].append(row)
                result["most"] = most_turned(result["models"])
                if asked.out:  # after every threat: a long run that is stopped leaves what it has
                    asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
