"""The commands and functions of the package with little to do: tiny models, one epoch, few queries.

The pages show what people run on their own data. Here the same lines run, as far as these limits let them.
`python -m tests.docs.shortened audit …` is the command line of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from anchorhold.config.settings import Settings

__all__ = ["shortened"]

QUERIES, STEPS, SIDES = 6, 2, (36, 32)
TINY = ("small", "mlp")


def _small(settings: Settings, own: bool) -> Settings:
    """The settings with one epoch, and, unless the model is the user's own, a tiny model."""
    train = replace(settings.train, epochs=1, evaluate_every=1, collapse_warmup=9)
    settings = replace(settings, train=train)
    if own or settings.model.backbone in TINY:
        return settings
    weights = settings.model.weights if Path(settings.model.weights or "none").exists() else ""
    return replace(
        settings,
        model=replace(settings.model, backbone="small", dim=16, weights=weights),
        data=replace(settings.data, resize=SIDES[0], crop=SIDES[1]),
        batch=replace(settings.batch, pairs=8, mining_pairs=0),
    )


@contextmanager
def shortened() -> Iterator[None]:
    """Inside, `fit` and `audit` do little, wherever they are called from."""
    from anchorhold.auditing import run as auditing
    from anchorhold.demo import digits
    from anchorhold.training import fit as training
    from anchorhold.training import sweeping as sweep

    prepared, audit = training.prepared, auditing.audit

    def less_prepared(model: Any, *rest: Any) -> Any:
        data, settings, given, notes = prepared(model, *rest)
        return data, _small(settings, given is not None), given, notes

    def less_audit(model: Any, data: Any, **options: Any) -> Any:
        limit, steps = options.get("limit", 1000), options.get("steps")
        options |= {"limit": min(limit or QUERIES, QUERIES), "resamples": 20, "device": "cpu"}
        if options.get("method", "pgd") == "pgd":
            options["steps"] = min(steps or STEPS, STEPS)
        options["epsilons"] = tuple(options.get("epsilons") or ())[-1:]
        return audit(model, data, **options)

    with (
        patch.object(training, "prepared", less_prepared),
        patch.object(auditing, "audit", less_audit),
        patch.object(sweep, "audit", less_audit),
        patch.multiple(digits, STEPS=STEPS, RESTARTS=1),
    ):
        yield


if __name__ == "__main__":
    from anchorhold.cli.main import main

    with shortened():
        main()
