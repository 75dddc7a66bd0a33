"""The threat as one argument: in training, audits, attacks on one image, receipts and the command line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import anchorhold as ah
from anchorhold.auditing.evidence import flags_of
from anchorhold.auditing.one_image import attack as attack_one
from anchorhold.auditing.realisable import levels_within
from anchorhold.auditing.receipts import digest
from anchorhold.auditing.verifying import verify
from anchorhold.config.recipes import settings_from
from anchorhold.errors import SettingsError
from anchorhold.perturb.ball import Ball
from anchorhold.training.preparing import against
from tests.cli.test_main import run

QUICK: dict[str, Any] = {"limit": 8, "resamples": 9, "examine": None, "device": "cpu"}


def test_a_training_takes_the_radius_and_keeps_its_number_of_steps() -> None:
    settings = settings_from("hm-lga", {"data": {"name": "cub", "root": "x"}})
    own = settings.defence
    wide = against(ah.Threat(eps=16 / 255), settings).defence
    assert (wide.eps, wide.norm, wide.steps) == (16 / 255, "linf", own.steps)
    assert wide.alpha == pytest.approx(2 * own.alpha)  # the same share of ε
    far = against(ah.Threat(eps=0.5, norm="l2"), settings).defence
    assert (far.eps, far.norm, far.alpha) == (0.5, "l2", pytest.approx(2.5 * 0.5 / own.steps))
    told = against(ah.Threat(eps=0.1, steps=3, alpha=0.05, start="random"), settings).defence
    assert (told.eps, told.steps, told.alpha, told.start) == (0.1, 3, 0.05, "random")
    assert replace(wide, eps=own.eps, alpha=own.alpha) == own
    assert against("standard", settings).defence.eps == 8 / 255
    for wrong in ({"start": "tiny"}, {"start": "foo"}):
        with pytest.raises(SettingsError, match="start"):
            against(ah.Threat(**wrong), settings)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="give its ε"):
        settings_from("hm-lga", {"data": {"name": "cub", "root": "x"}, "defence": {"norm": "l2"}})
    with pytest.raises(SettingsError, match="natural has no attack"):
        against(ah.Threat(), settings_from("natural", {"data": {"name": "digits"}}))
    with pytest.raises(SettingsError, match="proxy has no attack"):
        against(ah.Threat(), settings_from("proxy", {"data": {"name": "digits"}}))


@pytest.mark.medium
def test_a_run_against_l2_records_and_repeats_it(tmp_path: Path) -> None:
    few = {"train.epochs": 1, "model.dim": 8, "defence.steps": 2}
    made = ah.fit(None, "digits", "hm-lga", tmp_path / "a", overrides=few, threat=ah.Threat(0.5, "l2"), device="cpu")
    told = made.read_json()["settings"]["defence"]
    assert (told["eps"], told["norm"], told["steps"]) == (0.5, "l2", 2)
    by_hand = {**few, "defence.eps": 0.5, "defence.norm": "l2", "defence.alpha": told["alpha"]}
    same = ah.fit(None, "digits", "hm-lga", tmp_path / "b", overrides=by_hand, device="cpu")
    one, two = (ah.load(each.path).state_dict() for each in (made, same))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_levels_within_an_l2_ball_are_near_and_inside() -> None:
    torch.manual_seed(0)
    clean = torch.randint(0, 256, (6, 1, 8, 8)).double() / 255
    shift = torch.randn(6, 1, 8, 8).double()
    shift = 0.2 * shift / shift.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
    images = (clean + shift).clamp(0, 1)
    found = levels_within(images, clean, Ball(0.2, "l2")).double() / 255
    assert ((found - clean).flatten(1).norm(dim=1) <= 0.2 + 1e-6).all()
    assert (found - images).abs().max() <= 1.5 / 255  # rounding, and a little shorter where rounding made it longer
    assert torch.equal(levels_within(clean, clean, Ball(0.0, "l2")).double() / 255, clean)


@pytest.mark.slow
def test_l2_receipts_are_verified_and_longer_changes_are_not(tmp_path: Path) -> None:
    model, digits = ah.Embedder("small", 16, channels=1, size=(8, 8)).eval(), ah.dataset("digits")
    threat = ah.Threat(eps=0.4, norm="l2", steps=4)
    audit = ah.audit(model, digits, attacks=["margin"], threat=threat, strength="strong", out=tmp_path / "a", **QUICK)
    assert audit.settings["norm"] == "l2" and "L2 ε 0.4" in str(audit)
    assert audit.protocols["strong"].columns["margin"].value <= audit.protocols["corrected"].columns["margin"].value
    checked = verify(tmp_path / "a", model, digits, device="cpu")
    assert not checked.problems and checked.norm == "l2" and "L2 ε 0.4" in str(checked)
    place = tmp_path / "a/receipts/receipts.json"
    told = json.loads(place.read_text())
    place.write_text(json.dumps(told | {"eps": 0.05}))
    problems = verify(tmp_path / "a/receipts", model, digits, device="cpu").problems
    assert any("from its sample" in each for each in problems)
    forged = told | {"eps": 0.05}  # with hashes made again, only the images themselves tell
    for name, entries in forged["receipts"].items():
        for entry in entries:
            pixels = np.asarray(Image.open(tmp_path / "a/receipts" / entry["file"]))
            entry["hash"] = digest(forged, name, entry, pixels.reshape(*pixels.shape[:2], -1))
    place.write_text(json.dumps(forged))
    problems = verify(tmp_path / "a/receipts", model, digits, device="cpu").problems
    assert any("from its sample" in each for each in problems) and not any("hash" in each for each in problems)
    place.write_text(json.dumps(told | {"norm": "l1"}))
    with pytest.raises(ah.AnchorholdError, match="norm is 'l1'"):
        verify(tmp_path / "a/receipts", model, digits, device="cpu")


@pytest.mark.medium
def test_the_command_line_takes_a_norm(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ah.Embedder("small", 16, channels=1, size=(8, 8)).save("m.safetensors")
    words = ["audit", "m.safetensors", "--data", "digits", "--limit", "8", "--steps", "2", "--attacks", "ES"]
    code, out, err = run(capsys, monkeypatch, *words, "--norm", "l2", "--eps", "0.3", "--out", "a", "--device", "cpu")
    assert code == 0, err
    settings = json.loads((tmp_path / "a/audit.json").read_text())["settings"]
    assert (settings["norm"], settings["eps"], settings["alpha"]) == ("l2", 0.3, pytest.approx(2.5 * 0.3 / 2))
    assert "L2 ε 0.3" in out and "--norm l2" in (tmp_path / "a/page.html").read_text()
    for wrong, said in (
        (["--norm", "l2"], "--norm l2 needs --eps"),
        (["--norm", "l1", "--eps", "1"], "there are linf and l2"),
        (["--norm", "l2", "--eps", "1", "--threat", "adml"], "leave --norm out"),
        (["--norm", "l2", "--eps", "-1"], "must not be negative"),
    ):
        code, _, err = run(capsys, monkeypatch, *words, *wrong)
        assert code == 2 and said in err and err.count("\n") == 1, err
    one = attack_one(
        ah.load("m.safetensors"), "3", ah.dataset("digits"), "ES", threat=ah.Threat(0.3, "l2", 3), device="cpu"
    )
    assert "L2 ε 0.3" in str(one)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "norm"), [("cw", "l2"), ("square", "l2"), ("nes", "linf"), ("square", "linf")])
def test_a_healthy_model_has_no_flag_about_gradients(tmp_path: Path, method: Any, norm: Any) -> None:
    few = {"train.epochs": 2, "model.dim": 16}
    run = ah.fit(None, "digits", "natural", tmp_path / "run", overrides=few, device="cpu")
    threat = ah.Threat(0.5 if norm == "l2" else 0.1, norm)
    quick = {**QUICK, "limit": 40, "examine": flags_of, "steps": 8, "protocols": "corrected"}
    found = ah.audit(ah.load(run.path), "digits", attacks=["ES"], method=method, threat=threat, **quick)
    assert not {flag.name for flag in found.flags} & {"steps-do-not-hurt", "noise-as-strong", "eps-does-not-hurt"}


@pytest.mark.medium
def test_a_training_that_attacked_nothing_says_so(tmp_path: Path) -> None:
    quick = {"train.epochs": 1, "model.dim": 8, "defence.steps": 2}
    slow = ah.fit(None, "digits", "hm-lga", tmp_path / "a", overrides={**quick, "optimiser.lr": 1e-9}, device="cpu")
    flags = slow.read_json().get("flags") or []
    assert (slow.read_json()["image_steps"] == 0) == ("no-attack" in [flag["name"] for flag in flags])
    pulled = ah.fit(None, "digits", "minmax", tmp_path / "b", overrides=quick, device="cpu")
    assert pulled.read_json()["image_steps"] > 0 and not pulled.read_json().get("flags")


@pytest.mark.medium
def test_an_estimate_leaves_the_loss_that_it_is_given_alone() -> None:
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    torch.manual_seed(0)
    own = losses.ProxyAnchorLoss(5, 16)
    before = {name: value.clone() for name, value in own.state_dict().items()}
    changes = {"defence.loss": own, "model.dim": 16, "train.epochs": 1}
    ah.estimate(None, "digits", "natural", overrides=changes, device="cpu", seconds=0.5)
    assert all(torch.equal(before[name], value) for name, value in own.state_dict().items())
