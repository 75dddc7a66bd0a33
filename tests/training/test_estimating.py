"""An estimate counts what a run does, measures real steps, and leaves no trace."""

import copy
import os
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anchorhold as ah
from anchorhold.config.recipes import recipe_names, settings_from
from anchorhold.data.splits import Dataset, Split
from anchorhold.errors import DataError, ModelError, RunError, SettingsError
from anchorhold.training import forecasting, measuring
from anchorhold.training.forecasting import shorter
from anchorhold.training.measuring import Measured
from tests.cli.test_main import run
from tests.training.test_suited import SMALL, Lines, photographs


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs(tmp_path_factory.mktemp("estimating") / "photos")


def everything_below(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


@pytest.mark.medium
@pytest.mark.parametrize("recipe", ["natural", "hm-lga", "adml", "catride", "classify"])
def test_it_counts_what_a_run_does(recipe: str, photos: Path, tmp_path: Path) -> None:
    changes = {**SMALL, "train.evaluate_every": 2}
    found = ah.estimate(None, str(photos), recipe, overrides=changes, device="cpu", seconds=0)
    ran = ah.fit(None, str(photos), recipe, tmp_path / "run", overrides=changes, device="cpu")
    info, rows = ran.read_json(), ran.metrics()
    assert found.settings == info["settings"]
    assert [found.images, found.test_images] == info["data"]["images"] == [80, 40]
    assert (found.classes, found.epochs) == (4, 2)
    assert [found.steps_per_epoch, found.steps_per_epoch * 2] == [row["step"] for row in rows]
    assert found.optimiser_steps == 2 * found.steps_per_epoch
    most = found.image_steps * found.steps_per_epoch * found.epochs
    # A batch of pairs may be short; tuples of ADML are perturbed at random.
    assert recipe == "adml" or info["image_steps"] <= most * 1.01
    assert (found.image_steps > 0) == (recipe != "natural")


@pytest.mark.parametrize("recipe", [name for name in recipe_names() if name != "base"])
def test_every_recipe_can_be_estimated(recipe: str) -> None:
    found = ah.estimate(None, ah.dataset("digits"), recipe, device="cpu", seconds=0)
    assert found.steps_per_epoch == 15 and found.images == 901 and found.seconds > 0
    assert found.step_bytes is None or found.step_bytes > 0
    data = ah.dataset("digits")
    assert data.train.images is not None and data.test.images is not None
    assert found.image_bytes == data.train.images.nbytes + data.test.images.nbytes


def test_batches_of_more_classes_than_are_timed() -> None:
    """A few images are timed, of fewer classes than a batch of ADML has."""
    labels = torch.arange(40).repeat_interleave(4)
    split = Split("many", labels, [str(c) for c in range(40)], images=torch.zeros(160, 8, 8, 1, dtype=torch.uint8))
    changes = {"batch": {"kind": "classes", "classes": 30, "instances": 2}, "data": {"resize": 0, "crop": 0}}
    small = {"model": {"backbone": "small", "dim": 8, "weights": ""}}
    found = ah.estimate(None, Dataset("many", split, split), "adml", overrides=changes | small, device="cpu", seconds=0)
    assert found.classes == 40 and found.steps_per_epoch * 60 <= 160 < (found.steps_per_epoch + 1) * 60


def test_attacks_count_with_all_their_steps() -> None:
    found = ah.estimate(None, ah.dataset("digits"), "hm-lga", device="cpu", seconds=0)
    assert found.image_steps == 64 * 3 * 8  # triplets × images × steps, none dropped
    found = ah.estimate(None, ah.dataset("digits"), "act", device="cpu", seconds=0)
    assert found.image_steps == 64 * 2 * 8


class Odd(nn.Module):
    """A module with live BatchNorm and dropout, which draw and count."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten())
        self.out = nn.Linear(4 * 6 * 6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inside(x))


@pytest.mark.medium
def test_it_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    photos = photographs(tmp_path / "photos")
    module = Odd().train()
    module.inside[1].eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    modes = [each.training for each in module.modules()]
    settings = {"data.resize": 8, "data.crop": 8, "model.freeze_batchnorm": False}
    cache = Path(os.environ["ANCHORHOLD_CACHE"])
    files, cached = everything_below(tmp_path), everything_below(cache)
    torch.manual_seed(3)
    drawn = torch.rand(4)
    torch.manual_seed(3)
    found = ah.estimate(module, str(photos), "hm-lga", overrides=settings, device="cpu", seconds=0.2)
    assert torch.equal(torch.rand(4), drawn)
    assert found.optimiser_steps == 75 * 10
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert [each.training for each in module.modules()] == modes and all(p.grad is None for p in module.parameters())
    assert everything_below(tmp_path) == files and everything_below(cache) == cached


@pytest.mark.slow
def test_the_time_is_that_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a factor, and in time of the processor: others may use its cores now and not a moment later."""
    changes = {"train.epochs": 4, "train.evaluate_every": 2, "defence.start": "random"}
    data = ah.dataset("digits")
    monkeypatch.setattr(measuring, "time", SimpleNamespace(monotonic=time.process_time))
    found = ah.estimate(None, data, "act", overrides=changes, device="cpu", seconds=60)  # it ends with a whole batch
    begun = time.process_time()
    ah.fit(None, data, "act", tmp_path / "run", overrides=changes, device="cpu")
    assert 1 / 3 < (time.process_time() - begun) / found.seconds < 3
    assert found.timed_images == found.batch_images == 128


def test_a_part_of_a_batch_is_timed_where_the_whole_takes_too_long() -> None:
    class Slow:
        """Steps that take 0.1 s and 10 ms for each pair."""

        sizes: list[int]

        def step(self, pairs: int) -> float:
            self.sizes.append(pairs)
            return 0.1 + 0.01 * pairs

        def measured(self, size: int, whole: int, seconds: float) -> Measured:
            return Measured(size, seconds, 1, 0, 0, None)

    trial: Any = Slow()
    trial.sizes = []
    assert measuring._growing(trial, 112, 1e9).seconds == pytest.approx(0.1 + 1.12)
    assert trial.sizes == [2, 2, 2, 8, 8, 32, 32, 112, 112]
    trial.sizes = []
    part = measuring._growing(trial, 112, 2.0)
    assert part.pairs == max(trial.sizes) == 32 and part.seconds == pytest.approx(0.1 + 1.12)
    trial.sizes = []
    first = measuring._growing(trial, 112, 0.1)
    assert first.pairs == 2 and first.seconds == pytest.approx(0.12 * 56) and trial.sizes == [2]


def test_a_batch_that_does_not_fit_the_gpu_is_halved_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Card:
        device = torch.device("cpu")

        def step(self, pairs: int) -> float:
            if pairs > 30:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return 0.5

        def measured(self, size: int, whole: int, seconds: float) -> Measured:
            return Measured(size, seconds, 1, 0, 0, None)

    for name, value in (("reset_peak_memory_stats", None), ("max_memory_allocated", 10**9), ("empty_cache", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    trial: Any = Card()
    found = measuring._on_gpu(trial, 112)
    assert (found.pairs, found.fits, found.memory) == (28, False, 4 * 10**9) and found.seconds == 2.0
    settings = settings_from("hm-lga", {"data.name": "digits"})
    tries = forecasting._suggestions(settings, ah.dataset("digits"), found)
    assert len(tries) == 1 and "batch.pairs=28" in tries[0]


@pytest.mark.parametrize("recipe", ["natural", "adml"])
def test_one_step_an_epoch_brings_a_suggestion(recipe: str, photos: Path) -> None:
    many = {"batch.pairs": 100, "batch.classes": 4, "batch.instances": 20}
    one = ah.estimate(None, str(photos), recipe, overrides={**SMALL, **many}, device="cpu", seconds=0)
    assert one.steps_per_epoch == 1
    expected = "batch.pairs=8: 10 steps" if recipe == "natural" else "batch.classes=2: 2 steps"
    assert any(expected in text for text in one.suggestions)
    own = ah.estimate(None, str(photos), recipe, overrides=SMALL, device="cpu", seconds=0)
    assert own.steps_per_epoch >= 5 and not own.suggestions and len(own.notes) == 1
    assert own.batch_images < one.batch_images


def test_a_module_that_cannot_be_copied_is_one_line(photos: Path) -> None:
    class Single(Odd):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("only one of me")

    with pytest.raises(ModelError, match=r"cannot be copied, so no step can be timed \(RuntimeError: only one of me\)"):
        ah.estimate(Single(), str(photos), overrides={"data.resize": 8, "data.crop": 8}, device="cpu")


@pytest.mark.parametrize(
    ("data", "given", "error", "words"),
    [
        ("nowhere", {}, SettingsError, "no data set or folder 'nowhere'"),
        ("photos", {"recipe": "hmlga"}, SettingsError, r"no recipe 'hmlga'; did you mean hm-lga\?"),
        ("photos", {"overrides": {"lr": 1}}, SettingsError, r"did you mean optimiser.lr\?"),
        ("photos", {"seconds": -1}, SettingsError, "seconds must not be negative"),
    ],
)
def test_wrong_use_is_one_line(
    data: str, given: dict[str, Any], error: type[Exception], words: str, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos.parent)
    with pytest.raises(error, match=words) as found:
        ah.estimate(None, data, **{"device": "cpu", **given})
    assert "\n" not in str(found.value)


def test_it_is_made_in_one_process(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RunError, match="leave out torchrun"):
        ah.estimate(None, str(photos), device="cpu")


def test_a_bad_image_is_found(tmp_path: Path) -> None:
    photos = photographs(tmp_path / "photos", each=3)
    for path in photos.rglob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"cannot be read|not an image"):
        ah.estimate(None, str(photos), overrides=SMALL, device="cpu")


# Long trainings on a CPU are said beforehand -----------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize("listens", [True, False])
def test_a_long_training_on_a_cpu_is_said_beforehand(
    listens: bool, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecasting, "_PIXELS", 0)
    monkeypatch.setattr(forecasting, "LONG", 0.0)
    monkeypatch.setattr(forecasting, "PROBE", 0.0)
    report = Lines()
    given: dict[str, Any] = {"overrides": SMALL, "device": "cpu", "report": report if listens else None}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        run = ah.fit(None, str(photos), "hm-lga", tmp_path / "said", **given)
    lines = report.said if listens else [str(each.message) for each in heard]
    told = [line for line in lines if "20 steps take up to about" in line and "on this CPU" in line]
    ways = [line for line in lines if "to make it shorter: defence.steps=4, the recipe natural" in line]
    assert len(told) == len(ways) == 1
    assert not listens or report.said.index(told[0]) < min(
        at for at, line in enumerate(report.said) if line.startswith("folder/train")
    )
    monkeypatch.undo()
    plain = ah.fit(None, str(photos), "hm-lga", tmp_path / "plain", overrides=SMALL, device="cpu")
    assert run.read_json()["weights"] == plain.read_json()["weights"] and len(run.metrics()) == 2


@pytest.mark.medium
def test_a_tiny_run_is_not_probed_and_a_probe_that_fails_stops_nothing(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def fails(*_: Any) -> None:
        asked.append(1)
        raise RuntimeError("cannot measure")

    monkeypatch.setattr(forecasting, "measure", fails)
    ah.fit(None, str(photos), "natural", tmp_path / "one", overrides=SMALL, device="cpu")
    assert not asked
    monkeypatch.setattr(forecasting, "_PIXELS", 0)
    ah.fit(None, str(photos), "natural", tmp_path / "two", overrides=SMALL, device="cpu")
    assert asked == [1]


def test_what_makes_a_run_shorter_names_only_what_it_has() -> None:
    text = shorter(settings_from("hm-lga", {"data.name": "folder"}))
    for key in ("data.crop=112", "defence.steps=4", "train.epochs=25", "model.backbone", "natural", "GPU"):
        assert key in text
    small = shorter(settings_from("natural", {"data.name": "digits"}))
    assert small == "train.epochs=5, or a GPU"


# The command -------------------------------------------------------------------------------------------------


@pytest.mark.medium
def test_dry_run_prints_it_and_writes_nothing(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    photographs(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("anchorhold.training.estimating.SECONDS", 0.1)
    files = everything_below(tmp_path)
    sets = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    code, text, err = run(capsys, monkeypatch, "train", "photos", *sets, "--dry-run", "--device", "cpu")
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert code == 0, err
    assert "80 training images of 4 classes, 40 test images" in lines["data"]
    assert "16 images, 5 steps an epoch" in lines["batch"]
    assert "2 epochs, 10 optimiser steps, up to 80 image-steps" in lines["training"]
    assert "time" in lines and "memory" in lines and "batch.images = 16" in lines["note"]
    assert everything_below(tmp_path) == files
    code, text, _ = run(
        capsys, monkeypatch, "train", "photos", *sets, "--set", "batch.images=90", "--dry-run", "--device", "cpu"
    )
    assert code == 0 and "1 step an epoch" in text and "batch.images=16" in text
    monkeypatch.delenv("ANCHORHOLD_DEBUG", raising=False)
    for words, message in (
        (["train", "missing", "--dry-run"], "no data set or folder 'missing'"),
        (["train", "photos", "--recipe", "hmlga", "--dry-run"], "did you mean hm-lga?"),
        (["train", "photos", "--set", "lr=1", "--dry-run"], "did you mean optimiser.lr?"),
    ):
        code, _, err = run(capsys, monkeypatch, *words, "--device", "cpu")
        assert code == 2 and err.splitlines()[-1].startswith("error: ") and message in err, err
    assert everything_below(tmp_path) == files


def test_a_forecast_is_plain_data() -> None:
    found = ah.estimate(None, ah.dataset("digits"), "natural", device="cpu", seconds=0)
    kept = copy.deepcopy(found.to_dict())
    assert kept["optimiser_steps"] == 225 and kept["settings"]["train"]["epochs"] == 15
    assert "\n" in str(found) and "225 optimiser steps" in str(found)
