"""estimate(): what a training will take, before it starts.

print(ah.estimate(None, "photos/", "hm-lga"))
anchorhold train photos/ --dry-run
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..config.settings import Settings
from ..console import Report, Silent
from ..device import device_named
from ..distributed import started
from ..errors import RunError, check
from ..perturb.settings import Threat
from .forecasting import Forecast, forecast
from .preparing import against, build_model, completed, prepared

__all__ = ["Forecast", "estimate"]

SECONDS = 10.0


def estimate(
    model: nn.Module | None,
    data: Any,
    recipe: str | None = None,
    *,
    settings: Settings | None = None,
    overrides: Mapping[str, Any] | None = None,
    defence: Callable[..., Any] | str | None = None,
    threat: Threat | str | None = None,
    row: str = "",
    device: str = "auto",
    seconds: float = SECONDS,
    report: Report | None = None,
) -> Forecast:
    """What `fit` with the same arguments will take: steps, time and memory on this machine. Nothing is written.

    A few real steps are timed, on some images of `data` and a copy of the model.

    Args:
        model: as in `fit`; None builds the one that the settings describe. It is left as it was.
        data: as in `fit`.
        recipe: as in `fit`.
        settings: the whole settings, instead of recipe and overrides.
        overrides: changes to the recipe, such as {"train.epochs": 3}.
        defence: your own, as in `fit`.
        threat: as in `fit`.
        row: the published row that the settings belong to.
        device: auto, cpu, cuda or cuda:N.
        seconds: about how long steps are timed.
        report: receives messages; None is silent.

    >>> estimate(None, "digits", "natural", device="cpu", seconds=0).epochs
    15
    """
    check(seconds >= 0, f"seconds must not be negative, got {seconds}")
    if started()[1] > 1:
        raise RunError("an estimate is made in one process: leave out torchrun")
    report = report or Silent()
    data, chosen, given, notes = prepared(model, data, recipe, settings, overrides, defence, row)
    chosen = chosen if threat is None else against(threat, chosen)
    for note in data.notes:
        report.say(note)
    own = given or build_model(chosen, data)
    chosen, note = completed(chosen, own)
    return forecast(chosen, own, data, device_named(device), seconds, (*notes, note) if note else notes)
