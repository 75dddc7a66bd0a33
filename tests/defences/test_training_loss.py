"""Losses and miners of yours: what they are given, what an attack climbs, and what wrong use is told."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners
from torch import Tensor, nn

from anchorhold.config.build import build, to_dict
from anchorhold.config.recipes import parse_assignments, settings_from
from anchorhold.defences.hardness import hardness_manipulation
from anchorhold.defences.madry import adversarial_training
from anchorhold.defences.menu import DEFENCES
from anchorhold.defences.natural import natural
from anchorhold.defences.settings import HardnessSettings, MadrySettings, NaturalSettings, TradesSettings
from anchorhold.defences.step import Step
from anchorhold.defences.trades import trades
from anchorhold.defences.training_loss import TrainingLoss, training_loss
from anchorhold.errors import AnchorholdError, ModelError, RunError, SettingsError
from anchorhold.extensions import Origin
from anchorhold.losses import triplet
from anchorhold.random import Key
from tests.defences.test_hardness import make_step, train

PML = "pytorch_metric_learning.losses:"
MINERS = "pytorch_metric_learning.miners:"
LABELS = [7, 7, 3, 3, 9, 9, 7, 7, 5, 5, 3, 3]  # neither from 0 nor without gaps
NUMBERS = torch.tensor([2, 2, 0, 0, 3, 3, 2, 2, 1, 1, 0, 0])  # the same, from 0


def with_loss(name: str, recipe: str = "natural", **defence: Any) -> tuple[Step, Any, TrainingLoss]:
    settings = settings_from(recipe, {"defence": {"loss": name, **defence}}).defence
    step = make_step(LABELS)
    loss = training_loss(settings, torch.zeros(2, 16, dtype=torch.float64), step.batch.labels, Key.of(0))
    assert loss is not None
    step.companion = loss
    return step, settings, loss


# Mathematics -------------------------------------------------------------------------------------------------


def test_natural_training_gives_the_loss_embeddings_and_labels_from_zero() -> None:
    step, settings, _ = with_loss(f"{PML}MultiSimilarityLoss", loss_args={"alpha": 3, "beta": "40"})
    found, gradients = train(step, natural(step, settings))
    wanted = pml.MultiSimilarityLoss(alpha=3, beta=40)(step.model(step.batch.images), NUMBERS)
    step.model.zero_grad()
    wanted.backward()
    assert torch.allclose(found, wanted.detach(), atol=1e-12) and found > 0
    for own, other in zip(gradients, (p.grad for p in step.model.parameters() if p.grad is not None)):
        assert torch.allclose(own, other, atol=1e-12)


def test_proxies_fit_the_classes_and_get_a_gradient() -> None:
    step, settings, loss = with_loss(f"{PML}ProxyAnchorLoss", loss_args={"margin": 0.2})
    assert loss.loss.proxies.shape == (4, 16) and loss.loss.margin == 0.2
    found, _ = train(step, natural(step, settings))
    again = pml.ProxyAnchorLoss(4, 16, margin=0.2).double()
    again.load_state_dict(loss.loss.state_dict())
    wanted = again(step.model(step.batch.images), NUMBERS)
    assert torch.allclose(found, wanted.detach(), atol=1e-12)
    assert loss.loss.proxies.grad.abs().sum() > 0
    same = with_loss(f"{PML}ProxyAnchorLoss")[2].loss.proxies
    assert torch.equal(same, loss.loss.proxies)  # begun by the key, whatever torch drew before


@pytest.mark.parametrize(("miner", "args"), [("MultiSimilarityMiner", {"epsilon": 0.001}), ("BatchHardMiner", {})])
def test_a_miner_chooses_for_the_loss(miner: str, args: dict[str, float]) -> None:
    step, settings, _ = with_loss(f"{PML}ContrastiveLoss", miner=f"{MINERS}{miner}", miner_args=args)
    (found,) = natural(step, settings)
    e = step.model(step.batch.images)
    chosen = getattr(miners, miner)(**args)(e, NUMBERS)
    assert torch.allclose(found, pml.ContrastiveLoss()(e, NUMBERS, chosen), atol=1e-12)
    assert not torch.allclose(found, pml.ContrastiveLoss()(e, NUMBERS), atol=1e-6)


@pytest.mark.parametrize("name", ["MultiSimilarityLoss", "ProxyAnchorLoss"])
def test_min_max_climbs_the_loss_of_the_whole_batch(name: str) -> None:
    step, settings, loss = with_loss(f"{PML}{name}", "madry", start="zero", eps=0.1, alpha=0.03, steps=4)
    (found,) = adversarial_training(step, settings)
    clean = step.batch.images
    moved = clean.clone()
    with step.frozen() as embed:
        for _ in range(4):
            moved.requires_grad_(True)
            (gradient,) = torch.autograd.grad(loss.loss(embed(moved), NUMBERS), moved)
            moved = moved.detach() + 0.03 * gradient.sign()
            moved = torch.minimum(torch.maximum(moved, clean - 0.1), clean + 0.1).clamp(0, 1)
        assert torch.allclose(found, loss.loss(embed(moved), NUMBERS), atol=1e-9)
        assert found > loss.loss(embed(clean), NUMBERS)


def test_min_max_over_triplets_raises_their_loss() -> None:
    step = make_step()
    plain = train(step, natural(step, NaturalSettings()))[0]
    raised = train(step, adversarial_training(step, MadrySettings(eps=0.1, alpha=0.03)))[0]
    calm = train(step, adversarial_training(step, MadrySettings(eps=0.0, steps=0)))[0]
    assert raised > plain and torch.allclose(calm, plain, atol=1e-12)


@pytest.mark.parametrize(("shift", "factor"), [("squared", 1.0), ("cosine", 0.5)])
def test_trades_adds_how_far_embeddings_moved(shift: str, factor: float) -> None:
    step, settings, loss = with_loss(
        f"{PML}MultiSimilarityLoss", "trades", start="zero", eps=0.1, alpha=0.03, steps=3, beta=4, shift=shift
    )
    (found,) = trades(step, settings)
    clean = step.batch.images
    moved = clean.clone()
    with step.frozen() as embed:
        home = embed(clean)
        for call in range(3):
            moved.requires_grad_(True)
            e = embed(moved)
            goal = e.sum() if call == 0 else (e - home).square().sum()
            (gradient,) = torch.autograd.grad(goal, moved)
            moved = moved.detach() + 0.03 * gradient.sign()
            moved = torch.minimum(torch.maximum(moved, clean - 0.1), clean + 0.1).clamp(0, 1)
        pull = (embed(moved) - home).square().sum(1).mean() * factor
        assert pull > 0
        assert torch.allclose(found, loss.loss(home, NUMBERS) + 4 * pull, atol=1e-9)
    assert TradesSettings().start == "random"


@pytest.mark.parametrize("ics", [0.0, 0.5])
def test_hm_trains_with_the_loss_and_remembers_the_triplet_loss(ics: float) -> None:
    step, settings, loss = with_loss(f"{PML}MultiSimilarityLoss", "hm-lga", eps=0.1, alpha=0.03, steps=3, ics=ics)
    seen: list[Tensor] = []
    embed = step.embed
    step.embed = lambda images: seen.append(embed(images)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
    logged: dict[str, Any] = {}
    step.log = lambda name, value, weight=1.0: logged.__setitem__(name, value)
    (found,) = hardness_manipulation(step, settings)
    with step.frozen() as view:
        chosen = step.mine("softhard", view(step.batch.images), 0.2)
    rows = torch.stack([chosen.anchor, chosen.positive, chosen.negative], 1)
    e = seen[0].unflatten(0, (len(rows), -1))[:, :3]
    wanted = loss.loss(e.flatten(0, 1), NUMBERS[rows].flatten()) + ics * logged.get("ics", 0)
    assert torch.allclose(found, wanted, atol=1e-12)
    assert torch.allclose(step.state["previous_loss"], triplet(*e.detach().unbind(1), 0.2), atol=1e-12)


def test_the_attack_leaves_no_trace_in_the_loss() -> None:
    class Centred(nn.Module):
        """A loss with a running mean."""

        middle: Tensor

        def __init__(self, num_classes: int, embedding_size: int) -> None:
            super().__init__()
            self.proxies = nn.Parameter(torch.ones(num_classes, embedding_size))
            self.register_buffer("middle", torch.zeros(embedding_size))

        def forward(self, e: Tensor, labels: Tensor) -> Tensor:
            self.middle.lerp_(e.detach().mean(0), 0.1)
            return (e - self.middle - self.proxies[labels]).square().mean()

    step, settings, loss = with_loss(Centred, "madry", eps=0.1, steps=3)  # type: ignore[arg-type]
    losses = adversarial_training(step, settings)
    next(losses)
    once = loss.loss.middle.clone()
    with torch.no_grad():
        e = step.model(step.batch.images)
    assert once.abs().sum() > 0 and loss.loss.proxies.grad is None
    assert torch.norm(once) < 0.11 * torch.norm(e.mean(0)) * 1.5  # one call, not four
    assert all(p.grad is None for p in step.model.parameters())


def test_what_a_loss_draws_is_the_steps_and_yours_stays() -> None:
    def drawing(e: Tensor, labels: Tensor) -> Tensor:
        return e.sum() * (torch.rand(()) + np.random.rand())  # noqa: NPY002

    step, settings, _ = with_loss(drawing)  # type: ignore[arg-type]
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    values, draws = [], []
    for _ in range(2):
        values.append(next(natural(step, settings)).item())
        draws.append((torch.rand(()).item(), np.random.rand()))  # noqa: NPY002
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    assert values[0] == values[1]
    assert draws == [(torch.rand(()).item(), np.random.rand()) for _ in range(2)]  # noqa: NPY002


# Settings ----------------------------------------------------------------------------------------------------


def test_arguments_come_from_text_tables_and_objects() -> None:
    told = parse_assignments(
        [
            f"defence.loss={PML}TripletMarginLoss",
            "defence.loss_args.margin=1/10",
            "defence.loss_args.swap=true",
            "defence.loss_args.triplets_per_anchor=5",
            "defence.loss_args.distance.class=pytorch_metric_learning.distances:LpDistance",
            "defence.loss_args.distance.p=1",
            "defence.loss_args.reducer=pytorch_metric_learning.reducers:MeanReducer",
        ]
    )
    settings = settings_from("natural", told)
    loss = training_loss(settings.defence, torch.zeros(2, 8), torch.arange(4), Key.of(0))
    assert loss is not None
    made = loss.loss
    assert (made.margin, made.swap, made.triplets_per_anchor, made.distance.p) == (0.1, True, 5, 1)
    assert type(made.reducer).__name__ == "MeanReducer"
    record = to_dict(settings)
    codes = [
        f"{PML}TripletMarginLoss",
        "pytorch_metric_learning.distances:LpDistance",
        "pytorch_metric_learning.reducers:MeanReducer",
    ]
    for missing in codes:  # each of them has to be repeated, also inside arguments
        allowed = frozenset(codes) - {missing}
        with pytest.raises(RunError, match=f"names the code {missing}"):
            build(record, Origin("run.json", allowed))
    assert build(record, Origin("run.json", frozenset(codes))) == settings


def test_arguments_of_another_loss_are_not_inherited(tmp_path: Any) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        f'extends = "natural"\n[defence]\nloss = "{PML}MultiSimilarityLoss"\nloss_args = {{ alpha = 3, beta = 9 }}\n'
    )
    assert settings_from(str(recipe), {"defence.loss_args.beta": 4}).defence.loss_args == {"alpha": 3, "beta": 4}
    other = settings_from(str(recipe), {"defence": {"loss": f"{PML}ProxyAnchorLoss"}})
    assert other.defence.loss_args == {}


def needs_more(embeddings: Tensor, labels: Tensor, texts: Tensor) -> Tensor:
    return embeddings.sum()


def each(embeddings: Tensor, labels: Tensor) -> Tensor:
    return embeddings.square().sum(1)


def nan(embeddings: Tensor, labels: Tensor) -> Tensor:
    return embeddings.sum() * float("nan")


def cut(embeddings: Tensor, labels: Tensor) -> Tensor:
    return embeddings.detach().sum()


def two(embeddings: Tensor, labels: Tensor) -> Tensor:
    return embeddings.sum()


HERE = f"{__name__}:"


@pytest.mark.parametrize(
    ("defence", "message"),
    [
        ({"loss": f"{PML}MultiSimilarityLos"}, "did you mean MultiSimilarityLoss"),
        ({"loss": "tripled"}, "no loss 'tripled'; did you mean triplet"),
        ({"loss": "nowhere:Loss"}, "no module 'nowhere'"),
        ({"loss": f"{PML}MultiSimilarityLoss", "loss_args": {"alpah": 2}}, "takes no 'alpah'; did you mean alpha"),
        ({"loss": f"{PML}RankedListLoss"}, "do not fit .*RankedListLoss.*missing"),
        ({"loss": f"{PML}VICRegLoss"}, r"VICRegLoss fails .*called as loss\(embeddings, labels\)"),
        ({"loss": f"{HERE}needs_more"}, r"needs_more fails .*texts.*called as loss\(embeddings, labels\)"),
        ({"loss": f"{HERE}each"}, r"returns a tensor \(8,\) for a batch: a loss is one number"),
        ({"loss": f"{HERE}nan"}, "is NaN or infinite"),
        ({"loss": f"{HERE}cut"}, "without a gradient"),
        ({"loss": f"{HERE}HERE"}, "cannot be called"),
        ({"loss": f"{PML}DynamicSoftMarginLoss"}, "remembers earlier batches"),
        ({"miner": f"{MINERS}MultiSimilarityMiner"}, "triplet has samplers: set defence.loss"),
        ({"loss": f"{HERE}two", "miner": f"{MINERS}BatchHardMiner"}, r"loss\(embeddings, labels, indices\)"),
        ({"loss": f"{HERE}two", "miner": f"{MINERS}EmbeddingsAlreadyPackagedAsTriplets"}, "AsTriplets fails"),
        ({"loss": f"{HERE}two", "miner": "hard"}, "no miner 'hard'"),
        ({"loss_args": {"alpha": 2}}, "loss_args are for a loss of yours"),
        ({"loss_lr": 1}, "loss_lr is for"),
        ({"loss": f"{PML}MultiSimilarityLoss", "loss_lr": -1}, "must not be negative"),
        ({"loss": f"{PML}MultiSimilarityLoss", "margin": 0.3}, "does not read defence.margin.*loss_args.margin"),
        ({"loss": f"{PML}MultiSimilarityLoss", "sampler": "hardest"}, "does not read defence.sampler"),
        ({"loss": pml.MultiSimilarityLoss(), "loss_args": {"alpha": 2}}, "an object already"),
        ({"loss": 3}, "cannot be 3"),
        ({"loss": f"{PML}MultiSimilarityLoss", "loss_args": {"alpha": float("inf")}}, "must be finite"),
    ],
)
def test_wrong_use_is_one_line(defence: dict[str, Any], message: str) -> None:
    with pytest.raises(AnchorholdError, match=message) as told:
        settings = settings_from("natural", {"defence": defence}).defence
        training_loss(settings, torch.zeros(2, 16), torch.tensor([3, 3, 5, 5]), Key.of(0))
    assert "\n" not in str(told.value) and len(str(told.value)) < 320


def test_hand_made_settings_take_the_thing_and_no_name() -> None:
    assert NaturalSettings(loss=pml.MultiSimilarityLoss()).loss.endswith("MultiSimilarityLoss(...)")
    with pytest.raises(SettingsError, match="give the object itself"):
        NaturalSettings(loss=f"{PML}MultiSimilarityLoss")
    with pytest.raises(ModelError, match="did you mean ContrastiveLoss"):
        settings_from("madry", {"defence.loss": f"{PML}ContrastivLoss"})


# Samplers and gradual functions --------------------------------------------------------------------------------


def farthest(view: Any) -> tuple[Tensor, Tensor]:
    """The farthest positive and the farthest negative."""
    positives = view.distances.masked_fill(~view.same, -1)
    negatives = view.distances.masked_fill(view.same, -1)
    return tuple(d == d.amax(1, keepdim=True) for d in (positives, negatives))  # type: ignore[return-value]


@pytest.mark.parametrize("sampler", [farthest, f"{HERE}farthest"])
@pytest.mark.parametrize("recipe", ["natural", "act", "est", "ses", "rest", "adml", "madry", "trades", "catride"])
def test_a_sampler_of_yours_stands_where_a_name_may(recipe: str, sampler: Any) -> None:
    settings = settings_from(recipe, {"defence": {"sampler": sampler}})
    assert str(settings.defence.sampler) == f"{HERE}farthest"
    defence = DEFENCES[to_dict(settings)["defence"]["name"]]
    step = make_step()
    (loss,) = defence(step, settings.defence)
    assert loss.isfinite()
    if recipe == "natural":
        e = step.model(step.batch.images)
        d = torch.cdist(e, e)
        same = step.batch.labels[:, None] == step.batch.labels
        hand = [torch.relu(d[i][same[i]].max() - d[i][~same[i]].max() + 0.2) for i in range(0, len(e), 2)]
        assert torch.allclose(loss, torch.stack(hand).mean(), atol=1e-9)


def test_hm_takes_samplers_as_source_and_destination() -> None:
    settings = settings_from("hm-lga", {"defence": {"source": farthest, "destination": f"{HERE}hard", "steps": 1}})
    (loss,) = hardness_manipulation(make_step(), settings.defence)
    assert loss.isfinite() and settings.defence.raises
    same = settings_from("hm-lga", {"defence": {"source": farthest, "destination": farthest}}).defence
    assert not same.raises
    pair: list[Any] = [lambda view: farthest(view), lambda view: hard(view)]  # two objects with one name
    other = settings_from("hm-lga", {"defence": {"source": pair[0], "destination": pair[1]}}).defence
    assert other.source == other.destination and other.raises


def hard(view: Any) -> tuple[Tensor, Tensor]:
    return view.partner, ~view.same


def one_table(view: Any) -> Tensor:
    return view.partner


def short(view: Any) -> tuple[Tensor, Tensor]:
    return view.partner[:, :-1], view.any_negative


def below(view: Any) -> tuple[Tensor, Tensor]:
    return view.partner, -view.distances


def nobody(view: Any) -> tuple[Tensor, Tensor]:
    return view.partner & False, view.any_negative


def raising(view: Any) -> tuple[Tensor, Tensor]:
    raise KeyError("x")


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (one_table, "returns a Tensor; return two tables"),
        (short, r"returns \(6, 11\) for positives; return a table of chances \(6, 12\)"),
        (below, "a chance below 0"),
        (nobody, "leaves an anchor without a positive"),
        (raising, "fails .KeyError"),
        (lambda view: (None, view.same), "returns None for positives"),
    ],
)
def test_a_sampler_with_wrong_tables_is_one_line(sampler: Callable[..., Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        next(natural(make_step(), NaturalSettings(sampler)))


def half(previous: Tensor, margin: float) -> Tensor:
    return -margin * (0.5 if previous > 0.1 else 0.25)


@pytest.mark.parametrize(
    ("gradual", "more", "wanted"),
    [
        ("linear", {}, lambda loss: -min(0.2, loss)),
        ("linear", {"u": 0.5}, lambda loss: -0.2 * min(0.5, loss) / 0.5),
        ("power", {"power": 3}, lambda loss: -0.2 * (min(0.2, loss) / 0.2) ** 3),
        ("power", {"u": 0.4}, lambda loss: -0.2 * (min(0.4, loss) / 0.4) ** 2),
        (
            "sigmoid",
            {"slope": 6, "u": 0.5},
            lambda loss: -0.2 * (s(6 * (min(0.5, loss) / 0.5 - 0.5)) - s(-3)) / (s(3) - s(-3)),
        ),
        (half, {}, lambda loss: -0.1 if loss > 0.1 else -0.05),
        (f"{HERE}half", {}, lambda loss: -0.1 if loss > 0.1 else -0.05),
        (lambda previous, margin: -0.03, {}, lambda loss: -0.03),
    ],
)
@pytest.mark.parametrize("previous", [0.0, 0.07, 0.15, 0.3, 2.0])
def test_gradual_functions_follow_their_formulas(
    gradual: Any, more: dict[str, float], wanted: Callable[[float], float], previous: float
) -> None:
    settings = settings_from("hm-lga", {"defence": {"gradual": gradual, "eps": 0.1, "steps": 1, **more}})
    assert shortfall(settings.defence, previous) == pytest.approx(max(0.0, wanted(previous) + 0.1), abs=1e-9)


def shortfall(settings: HardnessSettings, previous: float) -> float:
    """max(0, H_D − H) of a triplet with H = −0.1."""
    step = make_step(state={"previous_loss": torch.tensor(previous, dtype=torch.float64)})
    e = torch.tensor([[[0.0, 0.0], [0.0, 0.3], [0.4, 0.0]]], dtype=torch.float64).expand(6, 3, 2)
    seen: list[Tensor] = []
    perturb = step.perturb

    def spied(embed: Any, units: Tensor, objective: Any, *rest: Any, **named: Any) -> Tensor:
        seen.append(objective.value(e, torch.arange(6)))
        return perturb(embed, units, objective, *rest, **named)

    step.perturb = spied  # type: ignore[method-assign]
    next(hardness_manipulation(step, settings))
    return float((-seen[0][0]).sqrt())


def s(x: float) -> float:
    return 1 / (1 + float(np.exp(-x)))


@pytest.mark.parametrize(("u", "share"), [(0.0, 0.0), (0.2, 0.0), (0.4, 0.25), (0.6, 0.5)])
def test_u_moves_the_onset_of_the_boost_too(u: float, share: float) -> None:
    settings = HardnessSettings(destination=-0.1, boost=0.1, u=u, eps=0.1, steps=1)
    assert shortfall(settings, 0.3) == pytest.approx(0.1 * share, abs=1e-8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradual": "linaer"}, "no gradual function 'linaer'; did you mean linear"),
        ({"gradual": "power", "destination": 2}, "set defence.destination to lga"),
        ({"power": 3}, "defence.power is of defence.gradual = power"),
        ({"slope": 3, "gradual": "power"}, "defence.slope is of defence.gradual = sigmoid"),
        ({"u": -1}, "u is a loss"),
        ({"gradual": half, "u": 0.3}, "does not read defence.u"),
        ({"gradual": lambda loss, margin: "far"}, "returns a str; return one number"),
        ({"gradual": lambda loss, margin: torch.zeros(3)}, "returns a Tensor; return one number"),
        ({"gradual": lambda loss, margin: float("nan")}, r"returns nan; a hardness lies in \[-2, 2\]"),
        ({"gradual": lambda loss, margin: 5}, "returns 5"),
        ({"gradual": lambda loss: 0.0}, "fails .TypeError"),
    ],
)
def test_a_wrong_gradual_function_is_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AnchorholdError, match=message):
        next(hardness_manipulation(make_step(), settings_from("hm-lga", {"defence": changes}).defence))
