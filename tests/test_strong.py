"""The strong audit: never weaker than the standard one, not fooled by what hides gradients, and receipts that hold."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import anchorhold as ah
from anchorhold.attacks import attack
from anchorhold.auditing import Audit, ensemble, run
from anchorhold.auditing import strong as strong_module
from anchorhold.auditing.algorithm1 import algorithm1
from anchorhold.auditing.ensemble import FALLS, MEMBERS
from anchorhold.auditing.realisable import in_8_bits, levels_within, through_jpeg
from anchorhold.auditing.receipts import _digest, verify
from anchorhold.data.datasets import Split
from anchorhold.errors import RunError, SettingsError
from anchorhold.model.embedder import Embedder
from anchorhold.perturb.ascend import Budget

QUICK: dict[str, Any] = {"steps": 4, "eps": 16 / 255, "alpha": 5 / 255, "limit": 12, "batch": 12, "device": "cpu"}
QUICK |= {"resamples": 49, "examine": None}


def shorter(steps: int = 5, queries: int = 8) -> tuple[ensemble.Member, ...]:
    """The ensemble with little work in it."""

    def less(member: ensemble.Member) -> ensemble.Member:
        budget, most = member.budget, queries if member.kind == "black" else steps
        return replace(member, budget=lambda eps: replace(budget(eps), steps=most, restarts=1))

    return tuple(less(member) for member in MEMBERS)


@pytest.fixture(scope="module", autouse=True)
def quick_ensemble() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "MEMBERS", shorter())
        yield


@pytest.fixture(scope="module")
def digits() -> Split:
    test = ah.dataset("digits").test
    return test.keep(torch.arange(0, len(test), 4))


@pytest.fixture(scope="module")
def model() -> Embedder:
    return Embedder("small", 16, channels=1, size=8)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audits") / "strong"


@pytest.fixture(scope="module")
def strong(model: Embedder, digits: Split, place: Path) -> Audit:
    return ah.audit(model, digits, strength="strong", epsilons=[4 / 255, 24 / 255], out=place, **QUICK)


# ---------------------------------------------------------------- never weaker


def rows_of(audit: Audit, protocol: str) -> dict[str, Tensor]:
    return {name: row for each in audit.runs for name, row in each.measures.get(protocol, {}).items()}


def test_strong_never_leaves_more_than_standard_sample_by_sample(strong: Audit) -> None:
    before, after = rows_of(strong, "corrected"), rows_of(strong, "strong")
    assert (
        set(after) == set(before) == {"CA+", "CA-", "QA+", "QA-", "TMA", "ES:D", "ES:R", "LTM", "GTM", "GTT", "GTT@1"}
    )
    for name, row in after.items():
        assert ((row >= before[name]) if name in FALLS else (row <= before[name])).all(), name
    assert any((after[name] != before[name]).any() for name in ("CA+", "CA-", "QA+", "QA-"))
    initial = {name: row for each in strong.runs for name, row in each.initial.get("strong", {}).items()}
    for name, row in after.items():  # nor more than no attack at all
        assert ((row >= initial[name]) if name in FALLS else (row <= initial[name])).all(), name


def test_the_standard_runs_are_its_first_members(strong: Audit) -> None:
    """Made again inside the ensemble they are the same, so what counts needs no correction."""
    assert strong.strong is not None
    columns, after = strong.protocols["corrected"].columns, strong.strong["after"]
    for name in ("CA-", "QA-", "TMA"):
        worst = torch.maximum(rows_of(strong, "corrected")[name], initial_of(strong, name)).mean()
        assert after[name]["standard"] == pytest.approx(float(worst) * (1 if name == "TMA" else 100), abs=1e-6)
    both = torch.stack([rows_of(strong, "corrected")[name] for name in ("ES:R", "LTM", "GTM")]).amin(0)
    assert after["recall"]["standard"] == pytest.approx(100 * float(both.minimum(initial_of(strong, "ES:R")).mean()))
    assert columns["ES:D"].value == pytest.approx(after["ES"]["standard"])
    for members in after.values():
        assert list(members) == ["standard", "pgd", "apgd", "apgd-free", "cw", "square"]


def initial_of(audit: Audit, name: str) -> Tensor:
    return next(each.initial["strong"][name] for each in audit.runs if name in each.initial.get("strong", {}))


def test_the_three_recall_columns_are_one_number(strong: Audit) -> None:
    rows = rows_of(strong, "strong")
    assert torch.equal(rows["ES:R"], rows["LTM"]) and torch.equal(rows["ES:R"], rows["GTM"])
    score = strong.protocols["strong"].ers
    assert score is not None and score.value < strong.protocols["corrected"].ers.value  # type: ignore[union-attr]
    assert "strong" in str(strong).splitlines()[6]


def test_the_order_of_members_can_only_help_the_attacker(strong: Audit) -> None:
    assert strong.strong is not None
    for name, after in strong.strong["after"].items():
        values = list(after.values())
        assert values == sorted(values, reverse=name not in (*FALLS, "ES")), name


def test_batches_change_nothing(strong: Audit, model: Embedder, digits: Split) -> None:
    double = Embedder("small", 16, channels=1, size=8).double()
    settings = {**QUICK, "attacks": ["QA+", "GTM"], "limit": 10, "strength": "strong"}
    one = ah.audit(double, digits, **{**settings, "batch": 10})
    two = ah.audit(double, digits, **{**settings, "batch": 4})
    for name, row in rows_of(one, "strong").items():
        assert torch.allclose(row, rows_of(two, "strong")[name], atol=1e-9)


def test_a_stopped_audit_goes_on(strong: Audit, model: Embedder, digits: Split, place: Path) -> None:
    again = ah.audit(model, digits, strength="strong", epsilons=[4 / 255, 24 / 255], out=place, **QUICK)
    assert again.to_dict()["protocols"] == strong.to_dict()["protocols"] and again.curve == strong.curve
    with pytest.raises(RunError, match="another attack"):
        ah.audit(model, digits, strength="strong", epsilons=[5 / 255], out=place, **QUICK)


# ---------------------------------------------------------------- curves, files


def test_curves_fall(strong: Audit, place: Path) -> None:
    assert strong.curve is not None
    assert strong.curve["eps"] == [0.0, 4 / 255, 16 / 255, 24 / 255]
    for name, line in strong.curve["lines"].items():
        assert line == sorted(line, reverse=name not in FALLS), name
    assert strong.curve["lines"]["R@1"][2] == pytest.approx(strong.protocols["strong"].columns["GTM"].value)
    assert strong.curve["lines"]["ERS"][2] == pytest.approx(strong.protocols["strong"].ers.value)  # type: ignore[union-attr]
    assert json.loads((place / "audit.json").read_text())["curve"]["lines"]["R@1"] == strong.curve["lines"]["R@1"]


def test_a_curve_of_standard_attacks(model: Embedder, digits: Split) -> None:
    found = ah.audit(model, digits, epsilons=[4 / 255, 32 / 255], attacks=["GTM", "QA+"], **QUICK)
    assert found.curve is not None and "strong" not in found.protocols and found.receipts is None
    assert found.curve["lines"]["R@1"] == sorted(found.curve["lines"]["R@1"], reverse=True)
    assert found.curve["lines"]["QA+"][0] > found.curve["lines"]["QA+"][-1]


def test_a_larger_eps_starts_where_a_smaller_one_ended(
    model: Embedder, digits: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[float] = []

    def spy(embed: Any, images: Tensor, *others: Any, starts: Tensor | None = None, **more: Any) -> Any:
        if starts is not None:
            begun.append(float((starts - images).abs().max()))
        return attack(embed, images, *others, starts=starts, **more)

    monkeypatch.setattr(ensemble, "attack", spy)
    ah.audit(model, digits, epsilons=[4 / 255, 8 / 255], attacks=["QA+"], **QUICK)
    assert begun == pytest.approx([4 / 255, 8 / 255], abs=1e-6)  # of 8/255 and of 16/255


def test_scores_as_files(strong: Audit) -> None:
    assert strong.strong is not None
    for form in ("8 bits", "JPEG 90"):
        kept = strong.strong["realisable"][form]
        assert set(kept["columns"]) == set(strong.protocols["strong"].columns) and kept["ers"] is not None
    bits, jpeg = (strong.strong["realisable"][form]["ers"] for form in ("8 bits", "JPEG 90"))
    score = strong.protocols["strong"].ers
    assert score is not None and abs(bits - score.value) < 3 and jpeg > score.value


def test_levels_stay_within_eps_and_jpeg_changes_images() -> None:
    clean = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    images = (clean + 0.04 * torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    images = torch.minimum(torch.maximum(images, clean - 0.05), clean + 0.05)
    levels = levels_within(images, clean, 0.05)
    assert ((levels.double() / 255 - clean.double()).abs() <= 0.05 + 1e-6).all()
    assert ((levels.double() / 255 - images.double()).abs() <= 1 / 255).all()
    assert torch.equal(levels_within(in_8_bits(clean), in_8_bits(clean), 0.0).float() / 255, in_8_bits(clean))
    colour = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    for each in (images, colour):
        back = through_jpeg(each)
        assert back.shape == each.shape and not torch.equal(back, each)
        assert (back - each).abs().mean() < 0.2 and torch.equal(back, in_8_bits(back))


# ---------------------------------------------------------------- what hides gradients


class Rounded(nn.Module):
    """A step without a derivative in front of a sound model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner((x * 12).round() / 12)  # type: ignore[no-any-return]


class Saturated(nn.Module):
    """Signs by a steep tanh: fp32 rounds its slope to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(1e4 * (x.flatten(1) - 0.3) @ self.weight.T)


@pytest.mark.parametrize("kind", ["rounded", "saturated"])
def test_hidden_gradients_fool_the_standard_audit_only(
    kind: str, digits: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "MEMBERS", shorter(6, 120))
    torch.manual_seed(0)
    net = Rounded(Embedder("small", 16, channels=1, size=8)) if kind == "rounded" else Saturated()
    settings = {**QUICK, "examine": run.flags_of, "eps": 0.1, "alpha": 0.03, "attacks": ["ES", "LTM", "GTM"]}
    found = ah.audit(net, digits, strength="strong", **settings)
    before, after = (found.protocols[name].columns for name in ("corrected", "strong"))
    clean = before["GTM"].initial
    assert clean is not None and clean > 60
    assert min(before[name].value for name in ("ES:R", "LTM", "GTM")) > clean - 10  # standard says: robust
    assert after["GTM"].value < clean / 2  # strong does not
    flags = {flag.name: flag.message for flag in found.flags}
    assert {"zero-gradient", "black-box-beats-white-box", "strong-below-standard"} <= set(flags)
    assert "fell to Square" in flags["black-box-beats-white-box"]
    assert "print would overstate by" in flags["strong-below-standard"]


def test_transfer_sees_what_the_models_own_gradients_do_not(digits: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MEMBERS", shorter(20, 1))
    net = Embedder("small", 16, channels=1, size=8)
    settings = {**QUICK, "examine": run.flags_of, "eps": 0.1, "attacks": ["GTM"], "strength": "strong"}
    found = ah.audit(Rounded(net), digits, surrogate=net, **settings)
    assert found.strong is not None and found.strong["surrogate"]
    after = found.strong["after"]["recall"]
    assert after["transfer"] < after["cw"] - 20
    assert "transfer-beats-white-box" in {flag.name for flag in found.flags}


def test_a_sound_model_raises_no_flag_of_the_black_box(strong: Audit) -> None:
    assert strong.strong is not None and strong.strong["doubts"]["black"] <= 5


# ---------------------------------------------------------------- receipts


def test_receipts_hold(strong: Audit, model: Embedder, digits: Split, place: Path) -> None:
    found = verify(place, model, digits, device="cpu")
    assert found.problems == () and found.images == 8 * 12
    told = json.loads((place / "receipts" / "receipts.json").read_text())
    recall = [entry["measure"] for entry in told["receipts"]["recall"]]
    assert found.means["recall"] == pytest.approx(sum(recall) / len(recall))
    assert found.means["recall"] == pytest.approx(
        strong.strong["realisable"]["8 bits"]["columns"]["GTM"] / 100, abs=0.1
    )  # type: ignore[index]


def test_queries_apart_from_the_gallery(model: Embedder, digits: Split, tmp_path: Path) -> None:
    data = {"query": digits.keep(torch.arange(0, 60)), "gallery": digits.keep(torch.arange(60, len(digits)))}
    settings = {**QUICK, "limit": 6, "strength": "strong", "attacks": ["CA-", "QA+", "GTM"]}
    found = ah.audit(model, data, out=tmp_path / "apart", **settings)
    before, after = rows_of(found, "corrected"), rows_of(found, "strong")
    assert all(((row >= before[n]) if n in FALLS else (row <= before[n])).all() for n, row in after.items())
    assert verify(tmp_path / "apart", model, data, device="cpu").problems == ()
    other = {**data, "query": digits.keep(torch.arange(1, 61))}
    assert "the query has another" in verify(tmp_path / "apart", model, other, device="cpu").problems[0]


def test_few_receipts_are_spread_over_the_samples_and_batches_may_have_none(
    model: Embedder, digits: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strong_module, "RECEIPTS", 2)
    monkeypatch.setattr(run, "MEMBERS", ())
    settings = {**QUICK, "limit": 6, "batch": 2, "steps": 1, "strength": "strong", "protocols": "corrected"}
    found = ah.audit(model, digits, out=tmp_path / "few", attacks=[*run.NINE, "untargeted", "targeted"], **settings)
    told = json.loads((tmp_path / "few" / "receipts" / "receipts.json").read_text())["receipts"]
    assert len(told) == 10
    for name, entries in told.items():
        ids = next(each.ids for each in found.runs if each.label == f"{name}.strong")
        assert [entry["sample"] for entry in entries] == [int(ids[0]), int(ids[-1])]
    assert verify(tmp_path / "few", model, digits, device="cpu").problems == ()


def copied(place: Path, to: Path) -> Path:
    import shutil

    shutil.copytree(place / "receipts", to)
    return to


def resigned(folder: Path, goal: str, row: int, **changes: Any) -> None:
    """A forger's receipts: hashes are made anew, so that only the content can tell."""
    file = folder / "receipts.json"
    told = json.loads(file.read_text())
    entry = told["receipts"][goal][row]
    entry |= changes
    pixels = np.asarray(Image.open(folder / entry["file"]))[:, :, None]
    entry["hash"] = _digest(told, goal, entry, pixels)
    file.write_text(json.dumps(told))


@pytest.mark.parametrize("signed", [False, True])
def test_an_image_past_eps_is_rejected(
    strong: Audit, model: Embedder, digits: Split, place: Path, tmp_path: Path, signed: bool
) -> None:
    folder = copied(place, tmp_path / "r")
    told = json.loads((folder / "receipts.json").read_text())
    entry = told["receipts"]["QA+"][3]
    assert digits.images is not None
    pixels = np.asarray(Image.open(folder / entry["file"])).copy()
    clean = digits.images[entry["sample"]].numpy()[:, :, 0].astype(int)
    at = np.unravel_index(int(np.argmax(clean < 200)), clean.shape)
    pixels[at] = clean[at] + 16  # on the edge of ε
    Image.fromarray(pixels).save(folder / entry["file"])
    resigned(folder, "QA+", 3)
    assert not any("levels from" in problem for problem in verify(folder, model, digits, device="cpu").problems)
    pixels[at] += 1
    Image.fromarray(pixels).save(folder / entry["file"])
    if signed:
        resigned(folder, "QA+", 3)
    problems = verify(folder, model, digits, device="cpu").problems
    assert any("17 levels from its sample, and ε is 16" in problem for problem in problems)
    assert any("its hash is another" in problem for problem in problems) is not signed


@pytest.mark.parametrize("signed", [False, True])
def test_a_changed_target_is_rejected(
    strong: Audit, model: Embedder, digits: Split, place: Path, tmp_path: Path, signed: bool
) -> None:
    folder = copied(place, tmp_path / "r")
    told = json.loads((folder / "receipts.json").read_text())
    other = [(told["receipts"]["QA+"][3]["targets"][0] + 1) % len(digits)]
    if signed:
        resigned(folder, "QA+", 3, targets=other)
    else:
        told["receipts"]["QA+"][3]["targets"] = other
        (folder / "receipts.json").write_text(json.dumps(told))
    problems = verify(folder, model, digits, device="cpu").problems
    assert any(f"aims at {other}, and seed 0 draws" in problem for problem in problems)


def test_another_model_other_data_and_another_measure_are_rejected(
    strong: Audit, model: Embedder, digits: Split, place: Path, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    other = Embedder("small", 16, channels=1, size=8)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert "of another model" in verify(place, other, digits, device="cpu").problems[0]
    assert "of other data" in verify(place, model, digits.keep(torch.arange(100)), device="cpu").problems[0]
    folder = copied(place, tmp_path / "forged")
    told = json.loads((folder / "receipts.json").read_text())
    told["model"] = run.fingerprint_of(other)  # the forger signs for the other model
    for goal, entries in told["receipts"].items():
        for entry in entries:
            pixels = np.asarray(Image.open(folder / entry["file"]))[:, :, None]
            entry["hash"] = _digest(told, goal, entry, pixels)
    (folder / "receipts.json").write_text(json.dumps(told))
    assert any("is measured" in problem for problem in verify(folder, other, digits, device="cpu").problems)
    with pytest.raises(RunError, match="strength strong"):
        verify(tmp_path, model, digits, device="cpu")


# ---------------------------------------------------------------- until, algorithm 1, settings


def test_until_goes_on_to_the_interval_asked_for(
    model: Embedder, digits: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**QUICK, "limit": 12, "steps": 1, "batch": 64}
    first = ah.audit(model, digits, **settings).protocols["corrected"].ers
    assert first is not None
    half = (first.high - first.low) / 2
    found = ah.audit(model, digits, until=0.7 * half, out=tmp_path / "u", **settings)
    score = found.protocols["corrected"].ers
    assert score is not None and (
        (score.high - score.low) / 2 <= 0.7 * half or found.data["attacked"][0] == len(digits)
    )
    assert found.data["attacked"][0] > 12 and (tmp_path / "u" / "audit.json").is_file()
    with pytest.raises(SettingsError, match="needs all nine"):
        ah.audit(model, digits, until=1.0, attacks=["GTT"], **settings)


def test_algorithm_1_of_two_models_with_three_methods(model: Embedder, digits: Split, tmp_path: Path) -> None:
    other = Embedder("small", 8, channels=1, size=8)
    options = {"limit": 30, "device": "cpu", "resamples": 9, "seeds": 2, "out": tmp_path}
    table = algorithm1({"natural": model, "robust": other}, digits, eps=0.08, **options)
    for rows in table.values.values():
        assert list(rows) == ["benign", "fgsm", "cw", "pgd"]
        assert all(rows[name]["R@1"] < rows["benign"]["R@1"] for name in ("fgsm", "cw", "pgd"))  # type: ignore[operator]
        assert rows["pgd"]["R@1 std"] is not None and rows["cw"]["R@1 std"] is None
    alone = ah.audit(model, digits, attacks=["nearest"], budget="adml", eps=0.08, method="cw", limit=30, device="cpu")
    assert alone.protocols["corrected"].columns["nearest"].value == table.values["natural"]["cw"]["R@1"]
    text = str(table)
    assert "C&W" in text and "natural" in text and "±" in text
    assert json.loads((tmp_path / "algorithm1.json").read_text())["eps"] == 0.08


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strength": "stark"}, "there are: standard, strong"),
        ({"strength": "strong", "protocols": "published"}, "corrected protocol"),
        ({"strength": "strong", "method": "fgsm"}, "begin with PGD"),
        ({"epsilons": [8]}, "8/255 is .031"),
        ({"until": 0.0}, "above 0"),
        ({"surrogate": nn.Identity()}, "strength = strong"),
    ],
)
def test_bad_settings_are_one_clear_line(model: Embedder, digits: Split, settings: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        ah.audit(model, digits, **{"device": "cpu", **settings})


def test_the_ensemble_is_what_the_page_says() -> None:
    steps = 0
    for member in MEMBERS:
        budget: Budget = member.budget(8 / 255)
        if member.kind == "white":
            steps += budget.steps * budget.restarts
    assert steps == ensemble.STEPS == 400 and MEMBERS[-1].budget(0.1).steps == ensemble.SQUARE_QUERIES == 1000
    page = (Path(__file__).resolve().parents[1] / "docs" / "auditing.md").read_text(encoding="utf-8")
    for words in ("1,000 queries", "400 image-steps", *(f"`{member.name}`" for member in MEMBERS)):
        assert words in page, words
