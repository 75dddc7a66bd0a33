"""`ah.adversary`: the batch of each defence, for a loop of yours, without a trace in the model."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anchorhold as ah
from anchorhold import losses
from anchorhold.config.build import to_dict
from anchorhold.config.recipes import settings_from
from anchorhold.defences.menu import DEFENCES
from anchorhold.defences.step import Batch, Step
from anchorhold.errors import AnchorholdError
from anchorhold.geometry import unit
from anchorhold.random import Key

STRONG = {"eps": 0.1, "alpha": 0.03, "steps": 3}
RECIPES = ["hm-lga", "hm-lga-ics", "minmax", "act", "est", "ses", "rest", "catride", "adml", "madry", "trades"]
MIXED = [3, 0, 3, 1, 0, 3, 1, 8, 0, 1, 1]  # 8 is alone
PAIRS = [0, 0, 1, 1, 2, 2, 0, 0]


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8))


def images(count: int, labels: list[int] | None = None) -> Tensor:
    """Noise; with labels, images of a class look alike."""
    noise = Key.of(1)("images").uniform(torch.arange(count), (1, 8, 8), torch.float32)
    if labels is None:
        return noise
    return 0.9 * Key.of(2)("classes").uniform(torch.tensor(labels), (1, 8, 8), torch.float32).round() + 0.1 * noise


def adversary(*args: Any, **named: Any) -> ah.AdversarialBatch:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ah.adversary(*args, **named)


@pytest.mark.parametrize("labels", [MIXED, PAIRS])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_defence_gives_images_in_the_ball_with_their_labels(recipe: str, labels: list[int]) -> None:
    model, x = net(), images(len(labels), labels)
    state = {"previous_loss": torch.tensor(0.0)}  # all is learnt: LGA's destination is 0
    batch = adversary(model, x, labels, recipe, state=state, **STRONG)
    count = len(batch.images)
    assert batch.images.shape[1:] == x.shape[1:] and len(batch.labels) == len(batch.origins) == count >= len(x) / 2
    assert torch.equal(batch.labels, torch.tensor(labels)[batch.origins])
    apart = (batch.images - x[batch.origins]).abs().flatten(1).amax(1)
    assert apart.max() <= 0.1 + 1e-6 and apart.max() > 0.02
    assert batch.images.min() >= 0 and batch.images.max() <= 1 and not batch.images.requires_grad
    assert batch.loss.ndim == 0 and bool(batch.loss.isfinite()) and not batch.loss.requires_grad
    if recipe in ("hm-lga", "hm-lga-ics", "minmax", "act", "catride"):
        assert batch.triplets is not None
        a, p, n = (batch.labels[index] for index in batch.triplets)
        assert torch.equal(a, p) and not (a == n).any() and 8 not in a
    else:
        assert batch.triplets is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_model_is_left_as_it_was(recipe: str) -> None:
    model = net().train()
    model[1].eval()  # modes of submodules of yours
    model(images(4)).sum().backward()
    model[4].bias.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    needs, modes = [p.requires_grad for p in model.parameters()], [m.training for m in model.modules()]
    x = images(8)
    copy, state = x.clone(), torch.random.get_rng_state()
    adversary(model, x, PAIRS, recipe, **STRONG)
    assert [m.training for m in model.modules()] == modes and torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for p, grad, needed in zip(model.parameters(), grads, needs):
        assert p.requires_grad == needed
        assert p.grad is None if grad is None else torch.equal(p.grad, grad)
    assert torch.equal(x, copy) and x.grad is None


@pytest.mark.parametrize("recipe", ["hm-lga", "hm-lga-ics", "madry", "catride", "est"])
def test_in_pair_order_it_is_the_step_of_training(recipe: str) -> None:
    """The same images and the same loss as the defence's own step has, with the same key."""
    model = ah.Embedder("small", 8, channels=1, size=8, seed=2)
    x, settings = images(8), settings_from(recipe, {"defence": STRONG})
    step = Step(
        model=model,
        batch=Batch(x, torch.tensor(PAIRS), torch.arange(8)),
        epoch=0,
        epochs=1,
        key=Key.of(7)("adversary", 0),
        state={},
    )
    seen: list[Tensor] = []
    embed = step.embed
    step.embed = lambda views: seen.append(views) or embed(views)  # type: ignore[method-assign, func-returns-value]
    (loss,) = DEFENCES[to_dict(settings)["defence"]["name"]](step, settings.defence)
    batch = adversary(model, x, PAIRS, recipe, seed=7, **STRONG)
    assert torch.equal(batch.images, seen[-1])
    assert torch.allclose(batch.loss, loss.detach(), atol=1e-6)


def test_lga_goes_on_from_step_to_step() -> None:
    model, x = net(), images(8, PAIRS)
    state: dict[str, Tensor] = {}
    first = ah.adversary(model, x, PAIRS, state=state, **STRONG)
    e = unit(model.eval()(first.images)).detach()
    assert first.triplets is not None
    by_hand = losses.triplet(*(e[index] for index in first.triplets), 0.2)
    assert torch.allclose(state["previous_loss"], by_hand, atol=1e-5) and int(state["step"]) == 1
    assert torch.allclose(first.loss, by_hand, atol=1e-5)
    state["previous_loss"] = torch.tensor(0.0)  # as if all were learnt: H_D rises from −γ to 0
    second = ah.adversary(model, x, PAIRS, state=state, **STRONG)
    assert int(state["step"]) == 2
    weak, strong = (hardness(model, batch) for batch in (first, second))
    assert weak + 0.1 < strong  # the weakest adversary, then one that aims at H = 0
    with pytest.warns(UserWarning, match="remembers previous_loss.*state=") as told:
        ah.adversary(model, x, PAIRS, **STRONG)
    assert len(told) == 1


def hardness(model: nn.Module, batch: ah.AdversarialBatch) -> float:
    assert batch.triplets is not None
    e = unit(model(batch.images)).detach()
    a, p, n = (e[index] for index in batch.triplets)
    return float(((a - p).norm(dim=1) - (a - n).norm(dim=1)).mean())


def test_the_threat_is_the_ball_of_the_batch() -> None:
    """In L2 no image moves farther than ε, some move that far; in Linf as with eps alone."""
    model, x = net(), images(8)
    moved = ah.adversary(model, x, PAIRS, "madry", threat=ah.Threat(eps=0.3, norm="l2", steps=4))
    far = (moved.images - x[moved.origins]).flatten(1).norm(dim=1)
    assert far.max() == pytest.approx(0.3, abs=1e-4) and far.max() <= 0.3 + 1e-5
    same = ah.adversary(model, x, PAIRS, "madry", threat=ah.Threat(eps=0.1, steps=3, alpha=0.05))
    assert torch.equal(same.images, ah.adversary(model, x, PAIRS, "madry", eps=0.1, steps=3, alpha=0.05).images)


def test_a_loss_of_yours_is_what_min_max_climbs() -> None:
    from pytorch_metric_learning.losses import MultiSimilarityLoss, ProxyAnchorLoss

    model, x = net().eval(), images(len(MIXED))
    labels = torch.tensor([1, 0, 1, 2, 0, 1, 2, 3, 0, 2, 2])
    for loss in (MultiSimilarityLoss(), ProxyAnchorLoss(4, 8)):
        batch = ah.adversary(model, x, labels, "madry", loss=loss, **STRONG)
        assert torch.equal(batch.origins, torch.arange(len(x)))  # all of your batch, in its order
        assert batch.loss > loss(unit(model(x)), labels)
        assert torch.allclose(batch.loss, loss(unit(model(batch.images)), labels), atol=1e-5)
        assert all(p.grad is None for p in loss.parameters())


@dataclass(frozen=True)
class NoiseSettings:
    size: float = 0.05
    half: bool = False
    told: bool = True


def noise(step: Step, settings: NoiseSettings) -> Iterator[Tensor]:
    x = step.batch.images + settings.size
    if settings.half:
        x = x[::2]
        if settings.told:
            step.trains_on(torch.arange(0, 2 * len(x), 2))
    yield step.embed(x.clamp(0, 1)).sum()


def test_a_defence_of_yours_gives_its_batch() -> None:
    x = images(8)
    batch = ah.adversary(net(), x, PAIRS, noise, size=0.1)
    assert torch.equal(batch.images, (x + 0.1).clamp(0, 1)) and batch.origins.tolist() == list(range(8))
    assert ah.adversary(net(), x, PAIRS, noise, half=True).origins.tolist() == [0, 2, 4, 6]
    with pytest.raises(AnchorholdError, match="does not say which: call step"):
        ah.adversary(net(), x, PAIRS, noise, half=True, told=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"defence": "hm-lgaa"}, "no defence or recipe 'hm-lgaa'; did you mean hm-lga"),
        ({"defence": "natural"}, "natural gives no adversarial batch"),
        ({"defence": "classify"}, "classify gives no adversarial batch"),
        ({"defence": "hm-free"}, "free training moves images by its own steps: choose hm-lga"),
        ({"epsilon": 1}, "no setting defence.epsilon"),
        ({"labels": [0, 1]}, "8 images and labels"),
        ({"labels": list(range(8))}, "no triplet: it needs two classes"),
        ({"images": torch.zeros(8, 64)}, r"floats \(B, C, H, W\)"),
        ({"images": 255 * images(8)}, "images / 255"),
        ({"model": "resnet18"}, "load it first"),
        (
            {
                "defence": "madry",
                "loss": "pytorch_metric_learning.losses:ProxyNCALoss",
                "loss_args": {"num_classes": 9},
            },
            "give the object",
        ),
    ],
)
def test_wrong_use_is_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AnchorholdError, match=message):
        adversary(**{"model": net(), "images": images(8), "labels": PAIRS, **changes})
