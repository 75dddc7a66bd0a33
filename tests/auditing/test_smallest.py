"""The smallest ε that reaches a goal: closed forms, brackets, and the command."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import anchorhold as ah
from anchorhold.attacks.goal import Scene
from anchorhold.attacks.menu import ATTACKS
from anchorhold.attacks.run import Attack
from anchorhold.attacks.smallest import smallest_attacks
from anchorhold.auditing.one_image import attack as attack_one
from anchorhold.auditing.smallest import smallest_perturbation
from anchorhold.errors import SettingsError
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.methods import METHODS
from anchorhold.perturb.settings import Budget
from anchorhold.random import Key
from tests.analytic import linear_embedder
from tests.cli.test_main import run

KEY = Key.of(5)


def line(pixels: int = 9) -> tuple[Any, Scene, Tensor, Tensor, Tensor]:
    """A linear model e = Wx, a gallery of two points u and v near e(x), and n = v − u with its offset at x.

    The label changes where n·(Wx' − m) = 0, m halfway between u and v.
    """
    embed, weight = linear_embedder(pixels)
    x = 0.3 + 0.4 * KEY("x").uniform(torch.arange(3), (1, 3, 3))
    e = embed(x)
    n = KEY("n").normal(torch.arange(1), (5,))[0]
    gallery = torch.stack([e[0] - 0.2 * n, e[0] + 0.4 * n])
    labels = torch.tensor([0, 1])
    scene = Scene(gallery, labels, e, torch.zeros(3, dtype=torch.long), torch.full((3,), -1))
    normal = gallery[1] - gallery[0]
    offset = (e - gallery.mean(0)) @ normal
    return embed, scene, x, weight.T @ normal, offset


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("method", ["pgd", "apgd"])
@pytest.mark.parametrize("goal", ["untargeted", "targeted"])
def test_the_border_of_a_linear_model_is_as_far_as_its_normal_says(goal: str, norm: Any, method: str) -> None:
    """The distance of x to {x' : n·(Wx' − m) = 0} is |n·(Wx − m)| / ‖Wᵀn‖, of order 1 for Linf and 2 for L2."""
    embed, scene, x, slope, offset = line()
    wanted = offset.abs() / torch.linalg.vector_norm(slope, ord=1 if norm == "linf" else 2)
    highest = 4 * float(wanted.max())
    attack = Attack(embed, scene, ATTACKS[goal]("corrected"), Ball(0.0, norm), Budget(), KEY, METHODS[method])

    def budget_at(eps: float) -> Budget:
        return Budget(60, 0.1 * eps) if method == "pgd" else Budget(60)

    found = smallest_attacks(attack, x, torch.arange(3), budget_at=budget_at, highest=highest, searches=12)
    width = highest / 2**12
    assert torch.allclose(found.eps, wanted.double(), rtol=0.01, atol=width) and (found.eps >= wanted - 1e-9).all()
    assert torch.allclose(found.eps - found.failed, torch.full((3,), width).double(), rtol=1e-9)
    assert found.checked.all() and (found.norms <= found.eps + 1e-12).all() and (found.norms > 0.99 * wanted).all()
    after = (embed(found.images) - scene.gallery.mean(0)) @ (scene.gallery[1] - scene.gallery[0])
    assert (after * offset.sign() <= 1e-12).all()  # every image found lies at the border or beyond


def test_what_is_reached_already_has_0_and_what_never_is_has_no_end() -> None:
    embed, scene, x, _, offset = line()
    there = Attack(embed, scene, ATTACKS["untargeted"]("corrected"), Ball(0.0), Budget(), KEY)
    never = smallest_attacks(there, x, torch.arange(3), budget_at=lambda eps: Budget(3, eps), highest=1e-6, searches=3)
    assert never.eps.isinf().all() and (never.failed == 1e-6).all() and not never.checked.any()
    assert torch.equal(never.images, x) and (never.norms == 0).all() and never.image_steps == 3 * 3
    wrong = Scene(
        scene.gallery, scene.gallery_labels, scene.queries, (offset < 0).long(), scene.own
    )  # not the nearest item's
    there = Attack(embed, wrong, ATTACKS["margin"]("corrected"), Ball(0.0), Budget(), KEY)
    done = smallest_attacks(there, x, torch.arange(3), budget_at=lambda eps: Budget(3, eps), highest=0.1, searches=3)
    assert (done.eps == 0).all() and (done.failed == 0).all() and done.checked.all() and done.image_steps == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ah.Embedder:
    quick = {"train.epochs": 2, "model.dim": 16}
    out = tmp_path_factory.mktemp("run")
    loaded = ah.load(ah.fit(None, "digits", "natural", out, overrides=quick, device="cpu").path)
    assert isinstance(loaded, ah.Embedder)
    return loaded


@pytest.mark.medium
@pytest.mark.parametrize(
    "how",
    [
        {"goal": "untargeted"},
        {"goal": "targeted", "threat": ah.Threat(4.0, "l2")},
        {"goal": "untargeted", "method": "cw", "steps": 20},
        {"goal": "margin", "threat": "adml"},
        {"goal": "GTT", "protocol": "published", "eps": 0.3},
        {"goal": "untargeted", "method": "square", "steps": 60, "searches": 4},
    ],
)
def test_the_attack_succeeds_at_what_is_found_and_fails_below(model: ah.Embedder, how: dict[str, Any]) -> None:
    found = smallest_perturbation(model, "3", ah.dataset("digits"), device="cpu", **{"searches": 6, **how})
    assert found.found and found.checked and 0 < found.size <= found.eps * (1 + 1e-6)
    assert found.eps - found.failed == pytest.approx(found.highest / 2 ** how.get("searches", 6))
    threat = how.get("threat", "standard")
    rest = {key: value for key, value in how.items() if key not in ("searches", "threat", "eps")}
    for eps, beaten in ((found.eps, True), (found.failed, False)):
        if not eps:
            continue
        norm = {"threat": ah.Threat(eps, "l2")} if isinstance(threat, ah.Threat) else {"threat": threat, "eps": eps}
        done = attack_one(model, "3", ah.dataset("digits"), device="cpu", **norm, **rest)
        kept = done.measures[how["goal"]][1]
        assert (kept < 0.5) == beaten, (eps, kept)


@pytest.mark.medium
def test_the_command_says_eps_and_bracket(model: ah.Embedder, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    model.save("m.safetensors")
    words = ["attack", "m.safetensors", "3", "--data", "digits", "--device", "cpu"]
    goal = [*words, "--goal", "untargeted"]
    code, out, err = run(capsys, monkeypatch, *goal, "--smallest", "--save", "x.png")
    assert code == 0, err
    found = smallest_perturbation(model, "3", ah.dataset("digits"), device="cpu")
    assert str(found) in out and f"{found.eps:.4g}" in out and f"{found.failed:.4g}" in out
    pixels = torch.tensor(list(Image.open("x.png").getdata()))  # type: ignore[arg-type]
    assert torch.equal(pixels, found.image.flatten().long())
    code, out, _ = run(capsys, monkeypatch, *goal, "--smallest", "--eps", "1e-6", "--save", "y.png")
    assert code == 0 and "upper end" in out and not Path("y.png").exists()
    for wrong, said in (
        ([*words, "--goal", "CA+", "--smallest"], "no smallest ε"),
        ([*goal, "--smallest", "--searches", "99"], "from 1 to 40"),
        ([*goal, "--searches", "5"], "--searches belongs to --smallest"),
        ([*goal, "--smallest", "--norm", "l2"], "--norm l2 needs --eps"),
        ([*goal, "--smallest", "--eps", "0"], "above 0"),
        ([*goal, "--smallest", "--steps", "0"], "without steps"),
    ):
        code, _, err = run(capsys, monkeypatch, *wrong)
        assert code == 2 and said in err and err.count("\n") == 1, err


@pytest.mark.medium
def test_a_file_without_a_class_is_refused_where_one_is_needed(model: ah.Embedder, tmp_path: Path) -> None:
    Image.new("L", (8, 8), 90).save(tmp_path / "x.png")
    with pytest.raises(SettingsError, match="needs the class"):
        smallest_perturbation(model, tmp_path / "x.png", ah.dataset("digits"), "ES", device="cpu")
    found = smallest_perturbation(model, tmp_path / "x.png", ah.dataset("digits"), device="cpu", searches=4)
    assert math.isfinite(found.eps)
