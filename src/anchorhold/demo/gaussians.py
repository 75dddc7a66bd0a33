"""The demo of ADML's appendix E: two Gaussian classes, embedded on a circle by a natural and a robust model.

Points of class a are around 0.25 in every pixel, and those of class b around 0.75. Both models separate the classes.
Then every test point is perturbed by at most 0.01 per pixel. The paper reports neither its network nor its learning
rate; both are our choice, and the result records them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..attacks.goal import Scene
from ..attacks.menu import goal_named
from ..attacks.run import Attack
from ..config.recipes import settings_from
from ..config.settings import Settings
from ..console import Report
from ..data.datasets import dataset
from ..data.splits import Dataset, Split
from ..device import computer_of
from ..distributed import Ranks
from ..errors import RunError, check
from ..geometry import euclidean, retrieve
from ..interface import argument, option
from ..model.embedder import Embedder, load_embedder
from ..model.frozen import embed_all, frozen
from ..perturb.ball import Ball
from ..perturb.settings import Budget
from ..random import Key
from ..runs.folder import Run
from ..runs.locks import one_writer
from ..runs.provenance import provenance
from ..runs.writing import atomic
from ..training.fit import fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["run_gaussians", "table"]

EPS = 0.01
SIDE, LR = 112, 1.5e-7
CHOSEN = "side, learning rate and batch size were chosen on seeds 0 to 3, on the same test points"
RECIPE, RATES = "adml-contrastive", {"natural": 0.0, "robust": 1.0}
ATTACKS = {
    "nearest": Budget(5, 2 * EPS / 5, start="random"),  # algorithm 1 as published
    "margin": Budget(40, 10 * EPS / 40, start="random", keep="best", schedule="linear"),
}
SHOWN = 16  # points in the figure, as in the paper
COLOURS = {"a": "#0072B2", "b": "#E69F00", True: "#009E73", False: "#D62728"}


def run_gaussians(
    out: Path, *, seed: int = 0, side: int = SIDE, report: Report, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Train both models on 3 × side × side inputs, attack both, and write gaussians.json and gaussians.png to `out`."""
    check(side >= 1, f"{argument('side')} must be at least 1 pixel, got {side}")
    # The rounding of sums depends on the number of threads, and batches of 16 gain nothing from a third one.
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, 2))
    try:
        with one_writer(out, Ranks(), report):
            return _demo(out, seed, side, report, overrides or {})
    finally:
        torch.set_num_threads(threads)


def _demo(out: Path, seed: int, side: int, report: Report, overrides: Mapping[str, Any]) -> dict[str, Any]:
    data = pictures(seed, side)
    result: dict[str, Any] = {
        "schema": "anchorhold.gaussians/1",
        "seed": seed,
        "inputs": 3 * side**2,
        "points": [len(data.train), len(data.test)],
        "eps": EPS,
        "attacks": {name: {"steps": budget.steps, "alpha": budget.alpha} for name, budget in ATTACKS.items()},
        "chosen": CHOSEN,
        **provenance(computer_of(torch.device("cpu"))),
    }
    circles = {}
    for name, rate in RATES.items():
        settings = _settings(seed, rate, overrides)
        if (out / name / "run.json").exists() and Run(out / name).read_json()["data"]["name"] != data.name:
            raise RunError(f"{out / name} holds a run that does not belong to the demo; choose another {option('out')}")
        report.say(f"training the {name} model (recipe {RECIPE}, attack rate {rate:g}, {settings.train.epochs} epochs)")
        run = fit(None, data, settings=settings, out=out / name, device="cpu", report=report, replace_run=True)
        report.say(f"attacking the {name} model")
        model = load_embedder(run.path)
        found, circles[name] = attacked(model, data.test, Key.of(seed)("gaussians"))
        result[name] = {"run": str(run.path), "attack_rate": rate, "steps": run.metrics()[-1]["step"], **found}
        result |= {"network": _layers(model), "lr": settings.optimiser.lr, "epochs": settings.train.epochs}
        result["batch"] = settings.batch.classes * settings.batch.instances
    try:
        result["figure"] = str(draw(out / "gaussians.png", circles, result))
    except ImportError:
        report.say("no figure, because matplotlib is not installed; run pip install 'anchorhold[plots]'")
    with atomic(out / "gaussians.json") as temporary:
        temporary.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return result


def pictures(seed: int, side: int) -> Dataset:
    """The Gaussian points of equation 20 as RGB images, for a model with mean and std of RGB."""
    data = dataset("gaussians", seed=seed, dimension=3 * side**2)

    def square(split: Split) -> Split:
        assert split.images is not None
        return replace(split, images=split.images.reshape(len(split), side, side, 3))

    return replace(data, train=square(data.train), test=square(data.test))


def _settings(seed: int, rate: float, overrides: Mapping[str, Any]) -> Settings:
    own: dict[str, Any] = {"data": {"name": "gaussians"}, "train": {"seed": seed}, "defence": {"attack_rate": rate}}
    sections = {"optimiser": {"lr": LR}} | {name: dict(section) for name, section in overrides.items()}
    return settings_from(RECIPE, sections | {name: sections.get(name, {}) | section for name, section in own.items()})


def _layers(model: Embedder) -> str:
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    return " → ".join(str(width) for width in (linear[0].in_features, *(layer.out_features for layer in linear)))


@dataclass(frozen=True)
class Circle:
    """One panel of the figure: the embeddings of all points, of some attacked ones, and the neighbours of those."""

    clean: Tensor  # (N, 2)
    labels: Tensor  # (N,)
    shown: Tensor  # (S,)
    moved: Tensor  # (S, 2)
    neighbours: Tensor  # (S,)


def attacked(model: Embedder, test: Split, key: Key) -> tuple[dict[str, Any], Circle]:
    """R@1 in percent of the test points among themselves, clean and under each attack; and the data of the figure."""
    assert test.images is not None
    images, ids = test.images.permute(0, 3, 1, 2), torch.arange(len(test))
    with frozen(model) as embed:
        clean = embed_all(embed, images.split(256))
        scene = Scene.of(clean, test.labels)
        after = {
            name: Attack(embed, scene, goal_named(name, "corrected"), Ball(EPS), budget, key).run(images, ids)
            for name, budget in ATTACKS.items()
        }
    moved = after["nearest"].embeddings
    right = retrieve(clean, clean, 1, query_labels=test.labels, gallery_labels=test.labels, exclude=ids).relevant
    found = {
        "clean": _percent(right),
        "attacked": {name: _percent(one.measures[name]) for name, one in after.items()},
        "shift": round(float(euclidean(clean, moved).mean()), 4),
    }
    shown = key("shown").permutation(len(test))[:SHOWN]
    neighbours = retrieve(moved[shown], clean, 1, exclude=shown).ids[:, 0]
    return found, Circle(clean, test.labels, shown, moved[shown], neighbours)


def _percent(share: Tensor) -> float:
    return round(100 * share.double().mean().item(), 2)


def draw(path: Path, circles: Mapping[str, Circle], result: Mapping[str, Any]) -> Path:
    """Figure 2 of ADML: the shift of attacked points, and whether their nearest neighbour has their class."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(7.4, 8.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(circles), squeeze=False)
    for column, (name, circle) in enumerate(circles.items()):
        found = result[name]
        title = f"{name}\nR@1 {found['clean']:.1f} %, under algorithm 1 {found['attacked']['nearest']:.1f} %"
        axes[0, column].set_title(title, fontsize=11)
        for row, ends in enumerate((circle.clean[circle.shown], circle.clean[circle.neighbours])):
            right = circle.labels[circle.shown] == circle.labels[circle.neighbours]
            colours = ["#888888" if row == 0 else COLOURS[bool(own)] for own in right]
            _circle(axes[row, column], circle, ends, colours)
    axes[0, 0].set_ylabel("shift under attack")
    axes[1, 0].set_ylabel("nearest neighbour under attack")
    point: dict[str, Any] = {"linestyle": "", "color": "#555555"}
    handles = [
        Line2D([], [], marker="o", label="class a", linestyle="", color=COLOURS["a"]),
        Line2D([], [], marker="o", label="class b", linestyle="", color=COLOURS["b"]),
        Line2D([], [], marker="x", label=f"attacked, ε = {result['eps']:g}", **point),
        Line2D([], [], color="#888888", label="shift"),
        Line2D([], [], color=COLOURS[True], label="right neighbour"),
        Line2D([], [], color=COLOURS[False], label="wrong neighbour"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
    return path


def _circle(axis: "Axes", circle: Circle, ends: Tensor, colours: list[str]) -> None:
    angle = torch.linspace(0, 2 * torch.pi, 181)
    axis.plot(angle.cos(), angle.sin(), color="#dddddd", linewidth=1, zorder=0)
    for start, end, colour in zip(circle.moved.tolist(), ends.tolist(), colours):
        axis.plot(*zip(start, end), color=colour, linewidth=1, zorder=1)
    for label, name in enumerate("ab"):
        own = circle.labels == label
        shown = circle.labels[circle.shown] == label
        for points, marker, size in ((circle.clean[own], "o", 5), (circle.moved[shown], "x", 6)):
            look: dict[str, Any] = {"color": COLOURS[name], "markersize": size, "fillstyle": "none"}
            axis.plot(points[:, 0], points[:, 1], marker, **look)
    axis.set(aspect="equal", xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


def table(result: Mapping[str, Any]) -> str:
    """A text table of R@1 in percent, clean and under both attacks, with the choices that the paper does not report."""
    head = ["R@1 in %", "clean", "algorithm 1", "stronger", "shift"]
    rows = [
        [
            name,
            *(f"{v:.1f}" for v in (result[name]["clean"], *result[name]["attacked"].values())),
            f"{result[name]['shift']:.3f}",
        ]
        for name in RATES
    ]
    lines = ["".join(f"{cell:>13}" if i else f"{cell:10}" for i, cell in enumerate(row)) for row in [head, *rows]]
    first, second = (result["attacks"][name] for name in ATTACKS)
    return "\n".join(
        [
            *lines,
            f"algorithm 1 of ADML: Linf, ε = {result['eps']:g}, {first['steps']} steps; "
            "shift is the mean distance that it moves an embedding",
            f"stronger: untargeted attack on R@1 with the same ε, {second['steps']} steps",
            f"network {result['network']} (ReLU, then the unit circle), Adam with learning rate {result['lr']:g}, "
            f"batches of {result['batch']}, {result['epochs']} epochs",
            result["chosen"],
        ]
    )
