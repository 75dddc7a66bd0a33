"""What training by a defence costs: image-steps of the inner attack for each triplet, from the records of runs.

    python benchmarks/cost.py results/cub/catride results/cub/hm-lga-ics-32 --out results/cub/cost.json

`possible` is the number with nothing dropped, as CA-TRIDE counts cost (Tian et al. 2024, 4.5): η for each image of a
triplet that moves, 3η in HM, 2η in ACT, and in CA-TRIDE 2η and η in turns. `taken` is what the runs took, since the
attack of a triplet, in CA-TRIDE of a batch, ends at its goal.
"""

import argparse
import json
from pathlib import Path
from typing import Any

MOVED = {"hardness": 3.0, "act": 2.0, "tride": 1.5}  # images of a triplet, on the mean


def cost(run: Path) -> dict[str, float]:
    """Image-steps of a run in which every training image is an anchor once an epoch."""
    info: dict[str, Any] = json.loads((run / "run.json").read_text(encoding="utf-8"))
    settings = info["settings"]
    defence = settings["defence"]
    whole = info["status"] == "done" and settings["batch"]["kind"] == "pairs"
    all_move = defence.get("members", "all") == "all" and defence.get("phases", "both") == "both"
    assert whole and all_move, f"{run}: give a finished run with batches of pairs, in which all members move"
    triplets = info["data"]["images"][0] * settings["train"]["epochs"]
    return {
        "triplets": triplets,
        "image_steps": info["image_steps"],
        "possible": MOVED[defence["name"]] * defence["steps"],
        "taken": info["image_steps"] / triplets,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    given = parser.parse_args()
    found = {run.name: cost(run) for run in given.runs}
    given.out.write_text(json.dumps({"cost": found}, indent=1) + "\n", encoding="utf-8")
    for name, each in found.items():
        print(f"{name:16} {each['taken']:6.2f} of {each['possible']:g} image-steps a triplet")


if __name__ == "__main__":
    main()
