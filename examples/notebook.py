"""What the cells of a notebook would do: train and audit with a bar below the cell, look at results, take the frames.

    python examples/notebook.py

In Jupyter the last line of a cell shows `_repr_html_`; here its length is printed.
"""

import tempfile
from pathlib import Path
from typing import Any

import anchorhold as ah


def main(out: Path) -> dict[str, Any]:
    # 1: the data
    data = ah.dataset("digits")
    print(repr(data))

    # 2: a training, with its progress
    short = {"train.epochs": 3, "train.evaluate_every": 1}
    run = ah.fit(None, data, "natural", out / "run", overrides=short, device="cpu", report=ah.Console())
    print(repr(run))
    losses = run.to_frame().set_index("epoch")["loss"]
    print(losses.round(4).to_dict())

    # 3: an audit over several ε
    audit = ah.audit(ah.load(run.path), data, limit=40, eps=0.1, alpha=0.03, epsilons=[0.02, 0.05], device="cpu")
    print(repr(audit))
    frame = audit.to_frame()
    attacks = frame[(frame.kind == "attack") & (frame.protocol == "corrected")]
    print(attacks.set_index("attack")[["before", "after", "low", "high"]].round(2).to_string())
    curve = frame[(frame.kind == "curve") & (frame.attack == "R@1")]
    print("R@1 against ε:", dict(zip(curve.eps.round(3), curve.after.round(1))))

    html = {name: len(thing._repr_html_()) for name, thing in {"data": data, "run": run, "audit": audit}.items()}
    print(f"HTML: {html}; frames: {run.to_frame().shape} and {frame.shape}")
    return {"frame": frame, "losses": losses, "audit": audit, "html": html}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
