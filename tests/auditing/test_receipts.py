"""Receipts of a strong audit: `verify` accepts its own and nothing else."""

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import anchorhold as ah
from anchorhold.attacks.goal import Scene
from anchorhold.attacks.menu import goal_named
from anchorhold.auditing import receipts, run, verifying
from anchorhold.auditing.receipts import digest, receipted
from anchorhold.auditing.result import Audit
from anchorhold.auditing.verifying import Verified, verify
from anchorhold.columns import rises
from anchorhold.data.splits import Split
from anchorhold.errors import AnchorholdError, RunError
from anchorhold.model.embedder import Embedder
from anchorhold.model.wrap import fingerprint_of
from anchorhold.random import Key
from tests.auditing.test_strong import QUICK, rows_of, shorter

pytestmark = pytest.mark.medium

FEW: dict[str, Any] = {**QUICK, "limit": 40, "batch": 40, "attacks": ["GTM", "QA+", "CA-", "ES"], "steps": 2}
GOALS = ("recall", "QA+", "CA-", "ES")


@pytest.fixture(scope="module", autouse=True)
def quick_ensemble() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "MEMBERS", shorter(2, 2))
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
    return ah.audit(model, digits, strength="strong", out=place, **FEW)


@pytest.fixture
def check(strong: Audit, model: Embedder, digits: Split) -> Callable[[Path], Verified]:
    return lambda folder: verify(folder, model, digits, device="cpu")


@pytest.fixture
def folder(strong: Audit, place: Path, tmp_path: Path) -> Path:
    """A copy of the receipts, without the audit."""
    return Path(shutil.copytree(place / "receipts", tmp_path / "copy"))


def read(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / "receipts.json").read_text())
    return told


def write(folder: Path, told: Any) -> None:
    (folder / "receipts.json").write_text(json.dumps(told))


def sign(folder: Path, told: dict[str, Any]) -> None:
    """A forger's receipts: hashes are made anew, so that only the content can tell."""
    for goal, entries in told["receipts"].items():
        for entry in entries:
            entry["hash"] = digest(told, goal, entry, np.asarray(Image.open(folder / entry["file"]))[:, :, None])
    write(folder, told)


# ---------------------------------------------------------------- its own


def test_receipts_hold(strong: Audit, place: Path, folder: Path, check: Callable[[Path], Verified]) -> None:
    found = check(place)
    assert found.problems == () and found.images == 4 * 32 and tuple(found.means) == GOALS
    told = read(place / "receipts")
    recall = [entry["measure"] for entry in told["receipts"]["recall"]]
    assert found.means["recall"] == pytest.approx(sum(recall) / len(recall))
    assert strong.strong is not None
    assert found.means["recall"] == pytest.approx(
        strong.strong["realisable"]["8 bits"]["columns"]["GTM"] / 100, abs=0.1
    )
    text = str(found)
    assert "128 images of 4 goals verified: recall" in text and "ε 16/255, seed 0, 40 samples of digits/test (" in text
    assert "agree with audit.json; its scores were not recomputed" in text
    assert "no audit.json" in str(check(folder)) and check(folder).problems == ()  # receipts may travel alone


def test_receipts_are_of_32_samples_spread_evenly() -> None:
    assert receipted(torch.arange(7)) == list(range(7))
    assert receipted(torch.arange(32)) == list(range(32))
    found = receipted(3 * torch.arange(1000))
    assert len(found) == 32 and found[0] == 0 and found[-1] == 2997
    gaps = {after - before for before, after in pairwise(found)}
    assert gaps <= {96, 97, 99}


def test_queries_apart_from_the_gallery(model: Embedder, digits: Split, tmp_path: Path) -> None:
    data = {"query": digits.keep(torch.arange(0, 60)), "gallery": digits.keep(torch.arange(60, len(digits)))}
    settings = {**QUICK, "limit": 6, "strength": "strong", "attacks": {"CA-": {"w": 2}, "QA+": {}, "GTM": {}}}
    found = ah.audit(model, data, out=tmp_path / "apart", **settings)
    before, after = rows_of(found, "corrected"), rows_of(found, "strong")
    assert all(((row >= before[n]) if rises(n) else (row <= before[n])).all() for n, row in after.items())
    held = verify(tmp_path / "apart", model, data, device="cpu")
    assert held.problems == () and list(held.means) == ["recall", "CA-:w=2", "QA+"]
    other = {**data, "query": digits.keep(torch.arange(1, 61))}
    assert "the fingerprint of the query differs" in verify(tmp_path / "apart", model, other, device="cpu").problems[0]


def test_few_receipts_are_spread_over_the_samples_and_batches_may_have_none(
    model: Embedder, digits: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipts, "RECEIPTS", 2)
    monkeypatch.setattr(run, "MEMBERS", ())
    settings = {**QUICK, "limit": 6, "batch": 2, "steps": 1, "strength": "strong", "protocols": "corrected"}
    found = ah.audit(model, digits, out=tmp_path / "few", attacks=[*run.NINE, "untargeted", "targeted"], **settings)
    told = read(tmp_path / "few" / "receipts")["receipts"]
    assert len(told) == 10
    for name, entries in told.items():
        ids = next(each.ids for each in found.runs if each.label == f"{name}.strong")
        assert [entry["sample"] for entry in entries] == [int(ids[0]), int(ids[-1])]
    assert verify(tmp_path / "few", model, digits, device="cpu").problems == ()


def test_an_audit_that_skipped_bad_images_holds(tmp_path: Path) -> None:
    for label in ("a", "b"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(5):
            pixels = np.random.default_rng([number, label == "a"]).integers(0, 255, (10, 10, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"{number}.png")
    (tmp_path / "photos" / "a" / "2.png").write_bytes(b"no image")
    net = Embedder("small", 8, size=8)
    settings = {**QUICK, "attacks": ["GTM"], "limit": 0, "strength": "strong", "on_bad_image": "skip"}
    found = ah.audit(net, tmp_path / "photos", out=tmp_path / "skipped", **settings)
    assert found.data["attacked"] == [9, 9]
    held = verify(tmp_path / "skipped", net, tmp_path / "photos", device="cpu")
    assert held.problems == () and held.images == 9


# ---------------------------------------------------------------- forgeries


@pytest.mark.parametrize("signed", [False, True])
def test_an_image_past_eps_is_rejected(
    folder: Path, digits: Split, check: Callable[[Path], Verified], signed: bool
) -> None:
    told = read(folder)
    entry = told["receipts"]["QA+"][3]
    assert digits.images is not None
    pixels = np.asarray(Image.open(folder / entry["file"])).copy()
    clean = digits.images[entry["sample"]].numpy()[:, :, 0].astype(int)
    at = np.unravel_index(int(np.argmax(clean < 200)), clean.shape)
    pixels[at] = clean[at] + 16  # on the edge of ε
    Image.fromarray(pixels).save(folder / entry["file"])
    sign(folder, told)
    assert not any("/255 from" in problem for problem in check(folder).problems)
    pixels[at] += 1
    Image.fromarray(pixels).save(folder / entry["file"])
    if signed:
        sign(folder, told)
    problems = check(folder).problems
    assert any("17/255 from its sample, but the audit's is ε 16/255" in problem for problem in problems)
    assert any("its hash differs" in problem for problem in problems) is not signed


@pytest.mark.parametrize("signed", [False, True])
def test_a_changed_target_is_rejected(
    folder: Path, digits: Split, check: Callable[[Path], Verified], signed: bool
) -> None:
    told = read(folder)
    entry = told["receipts"]["QA+"][3]
    entry["targets"] = [(entry["targets"][0] + 1) % len(digits)]
    sign(folder, told) if signed else write(folder, told)
    assert any(f"targets {entry['targets']}, but seed 0 draws" in problem for problem in check(folder).problems)


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("row", [0, 17])
def test_one_misstated_measure_is_rejected(
    folder: Path, check: Callable[[Path], Verified], goal: str, row: int
) -> None:
    told = read(folder)
    entry = told["receipts"][goal][row]
    entry["measure"] = 1 - entry["measure"] if goal == "recall" else entry["measure"] + 0.01
    sign(folder, told)
    problems = check(folder).problems
    assert len(problems) == 1 and f"{entry['file']}: " in problems[0] and "stated" in problems[0]
    entry["measure"] = None
    sign(folder, told)
    assert "stated nan" in check(folder).problems[0]


def test_an_answer_that_rounding_decides_may_be_stated_either_way() -> None:
    """Two items at ±1 and an embedding on the line between them, and one that is not."""
    embeddings = torch.tensor([[1e-6, 1.0], [1e-2, 1.0]])

    def right(e: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return (e[:, 0] > 0).double()

    measured, stated = torch.ones(2).double(), torch.zeros(2).double()
    assert verifying._untrue(stated, measured, embeddings, right, Key.of(0)) == [1]
    assert verifying._untrue(measured, measured, embeddings, right, Key.of(0)) == []


def test_a_target_that_rounding_decides_may_be_stated_either_way(model: Embedder) -> None:
    """QA- aims at one of the two nearest items; where they are as near as rounding, at either of them."""
    e = F.normalize(torch.tensor([[1.0, 0.0], [0.9, 0.3], [0.9, -0.3 + 1e-7], [-1.0, 0.2]]))
    scene, goal, ids = Scene.of(e, torch.tensor([0, 0, 1, 1])), goal_named("QA-", "corrected"), torch.tensor([0, 3])
    near, far = (int(aim) for aim in goal.targets(scene, ids, Key.of(0)))
    assert near in (1, 2)
    bench = verifying._Bench(Path(), {}, model, None, scene, [])  # type: ignore[arg-type]
    for other in (1, 2):
        aims, drawn = bench._aims(goal, ids, [[other], [far]], Key.of(0))
        assert aims is not None and drawn == [[other], [far]] == aims.reshape(2, -1).tolist()
    for wrong in ([3], [0], [1, 2], ["1"]):
        assert bench._aims(goal, ids, [wrong, [far]], Key.of(0))[1] == [[near], [far]]
    assert bench._aims(goal, ids, [[near], [0 if far else 1]], Key.of(0))[1] == [[near], [far]]


@pytest.mark.parametrize("change", ["half", "twice", "other", "lower limit", "other seed"])
def test_chosen_samples_are_rejected(
    folder: Path, strong: Audit, check: Callable[[Path], Verified], change: str
) -> None:
    told = read(folder)
    entries = told["receipts"]["recall"]
    if change == "half":
        told["receipts"]["recall"] = [entry for entry in entries if entry["measure"] > 0.5]
        assert 0 < len(told["receipts"]["recall"]) < 32
    elif change == "twice":
        entries[1] = dict(entries[0])
    elif change == "other":
        free = min(set(range(200)) - {entry["sample"] for entry in entries})
        shutil.copy(folder / entries[0]["file"], folder / f"recall/{free:06d}.png")
        entries[0] |= {"sample": free, "file": f"recall/{free:06d}.png"}
    elif change == "lower limit":
        told["limit"] = 20
    else:
        told["seed"] = 1
    sign(folder, told)
    assert any("recall: " in problem and "are missing" in problem for problem in check(folder).problems)


def test_another_model_and_other_data_are_rejected(
    place: Path, folder: Path, model: Embedder, digits: Split, check: Callable[[Path], Verified]
) -> None:
    torch.manual_seed(1)
    other = Embedder("small", 16, channels=1, size=8)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert "belong to another model" in verify(place, other, digits, device="cpu").problems[0]
    assert "belong to other data" in verify(place, model, digits.keep(torch.arange(100)), device="cpu").problems[0]
    told = read(folder)
    told["model"] = fingerprint_of(other)  # the forger signs for the other model
    sign(folder, told)
    assert any("measured" in problem for problem in verify(folder, other, digits, device="cpu").problems)


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        (("settings", "eps"), 4 / 255, "states another eps"),
        (("settings", "seed"), 5, "states another seed"),
        (("settings", "limit"), 1000, "states another limit"),
        (("model", "weights"), "0" * 16, "states another model"),
        (("data", "images"), [1, 1], "states another data"),
    ],
)
def test_receipts_of_another_audit_are_rejected(
    strong: Audit, place: Path, tmp_path: Path, check: Callable[[Path], Verified], where: Any, value: Any, words: str
) -> None:
    copy = Path(shutil.copytree(place, tmp_path / "audit"))
    audit = json.loads((copy / "audit.json").read_text())
    audit[where[0]][where[1]] = value
    (copy / "audit.json").write_text(json.dumps(audit))
    assert any(words in problem for problem in check(copy).problems)
    assert any(words in problem for problem in check(copy / "receipts").problems)


@pytest.mark.parametrize("runs", [None, [3], [{}], [{"attack": ["x"], "goals": []}]])
def test_a_strange_audit_beside_is_no_traceback(
    strong: Audit, place: Path, tmp_path: Path, check: Callable[[Path], Verified], runs: Any
) -> None:
    copy = Path(shutil.copytree(place, tmp_path / "audit"))
    audit = json.loads((copy / "audit.json").read_text())
    (copy / "audit.json").write_text(json.dumps({**audit, "runs": runs}))
    assert "has no strong audit" in check(copy).problems[0]
    (copy / "audit.json").write_text("{")
    with pytest.raises(RunError, match=r"cannot read .*audit.json"):
        check(copy)


def test_the_order_of_receipts_is_of_no_importance(folder: Path, check: Callable[[Path], Verified]) -> None:
    told = read(folder)
    told["receipts"]["QA+"].reverse()
    write(folder, told)
    assert check(folder).problems == ()


def test_a_goal_left_out_or_with_other_settings_is_rejected(
    strong: Audit, place: Path, tmp_path: Path, check: Callable[[Path], Verified]
) -> None:
    copy = Path(shutil.copytree(place, tmp_path / "audit"))
    told = read(copy / "receipts")
    del told["receipts"]["CA-"], told["goals"]["CA-"]
    write(copy / "receipts", told)
    assert "audit.json has recall, QA+, CA-, ES" in check(copy).problems[0]
    told = read(place / "receipts")
    told["goals"]["CA-"]["settings"]["w"] = 3
    write(copy / "receipts", told)
    assert "audit.json has other settings for CA-" in check(copy).problems


# ---------------------------------------------------------------- files that are no receipts


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        told = read(folder)
        change(told)
        write(folder, told)

    return act


def first_file(folder: Path) -> Path:
    return folder / str(read(folder)["receipts"]["recall"][0]["file"])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty file": (lambda f: (f / "receipts.json").write_text(""), "cannot read"),
    "truncated": (lambda f: cut(f / "receipts.json"), "cannot read"),
    "no text": (lambda f: (f / "receipts.json").write_bytes(b"\xff\xfe\x00"), "cannot read"),
    "deep": (lambda f: (f / "receipts.json").write_text("[" * 100_000), "cannot read"),
    "a list": (lambda f: (f / "receipts.json").write_text("[]"), "not of schema"),
    "another schema": (edited(lambda t: t.update(schema="x")), "not of schema"),
    "no receipt at all": (edited(lambda t: t.update(receipts={}, goals={})), "holds no receipts"),
    "no receipt of a goal": (edited(lambda t: t["receipts"].update(recall=[])), "recall has no receipts"),
    "no goals": (edited(lambda t: t.pop("goals")), "has no goals"),
    "other goals": (edited(lambda t: t["goals"].pop("ES")), "different names"),
    "an unknown goal": (edited(lambda t: t["goals"]["QA+"].update(attack="QB")), "no attack is called 'QB'"),
    "another attack": (edited(lambda t: t["goals"]["QA+"].update(attack="TMA", settings={})), "not attacked by TMA"),
    "another direction": (edited(lambda t: t["goals"]["QA+"]["settings"].update(raised=False)), "not attacked by QA"),
    "a wrong setting": (edited(lambda t: t["goals"]["QA+"]["settings"].update(m="two")), "has no setting m = 'two'"),
    "eps no number": (edited(lambda t: t.update(eps="8/255")), "eps of it is str"),
    "eps NaN": (edited(lambda t: t.update(eps=float("nan"))), "NaN is not a number"),
    "eps large": (edited(lambda t: t.update(eps=16)), "ε is 16"),
    "measure NaN": (edited(lambda t: t["receipts"]["ES"][0].update(measure=float("nan"))), "NaN is not a number"),
    "no data": (edited(lambda t: t["data"].pop("query")), "query of its data"),
    "data no table": (edited(lambda t: t["data"].update(gallery="digits")), "gallery of its data is str"),
    "another protocol": (edited(lambda t: t["goals"]["QA+"]["settings"].update(protocol="published")), "no setting"),
    "a huge setting": (edited(lambda t: t["goals"]["QA+"]["settings"].update(m=10**15)), "no setting m"),
    "a huge measure": (edited(lambda t: t["receipts"]["ES"][0].update(measure=10**400)), "not a share, cosine or dist"),
    "entry no table": (edited(lambda t: t["receipts"].update(ES=[3])), "receipt 0 of ES is int"),
    "sample no number": (
        edited(lambda t: t["receipts"]["ES"][2].update(sample="2")),
        "sample of receipt 2 of ES",
    ),
    "file elsewhere": (edited(lambda t: t["receipts"]["ES"][0].update(file="../x.png")), "receipt 0 of ES has no file"),
    "no image": (lambda f: first_file(f).unlink(), "cannot read the receipt"),
    "truncated image": (lambda f: cut(first_file(f)), "cannot read the receipt"),
    "image of 16 bits": (
        lambda f: Image.fromarray(np.zeros((8, 8), np.uint16)).save(first_file(f)),
        "is uint16 of shape",
    ),
    "another shape": (lambda f: Image.fromarray(np.zeros((8, 9), np.uint8)).save(first_file(f)), "of shape"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_clear_line(folder: Path, check: Callable[[Path], Verified], name: str) -> None:
    act, words = BROKEN[name]
    act(folder)
    with pytest.raises(AnchorholdError, match=words) as raised:
        check(folder)
    assert "\n" not in str(raised.value)


def test_a_folder_without_receipts(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="strength='strong'"):
        verify(tmp_path, nn.Identity(), tmp_path, device="cpu")
