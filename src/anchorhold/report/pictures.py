"""Small pictures for the examples of an audit, so that its page needs no access to the images."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from ..errors import RunError
from ..runs.fields import parsed
from ..runs.files import regular
from ..runs.schemas import AUDIT_SCHEMA
from ..runs.writing import atomic

__all__ = ["AIMED", "SHOWN", "SHOWN_CHANNELS", "Pictures", "load_pictures"]

Array = np.ndarray[Any, np.dtype[Any]]
SHOWN_CHANNELS = (1, 3)  # of images that the page shows: a browser takes 2 or 4 as partly transparent
SHOWN = 5  # neighbours with a picture
AIMED = ("QA+", "QA-", "TMA", "GTM", "GTT", "nearest")  # attacks whose targets are gallery items


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images of both sides by id: `images[side][id]` is uint8 (H, W, C), `classes[side][id]` the name of its class."""

    images: dict[str, dict[int, Array]]
    classes: dict[str, dict[int, str]]

    def save(self, path: Path) -> None:
        """Write them to one file, with class names as metadata."""
        tensors = {}
        for side, images in self.images.items():
            tensors[f"{side}/ids"] = np.array(list(images), dtype=np.int64)
            tensors[f"{side}/images"] = np.stack(list(images.values()))
        names = {side: list(classes.values()) for side, classes in self.classes.items()}
        with atomic(path) as temporary:
            safetensors.numpy.save_file(tensors, temporary, {"schema": AUDIT_SCHEMA, "classes": json.dumps(names)})


def load_pictures(path: Path) -> Pictures:
    """Read a file of `Pictures.save`."""
    try:
        with safetensors.safe_open(regular(path), "numpy") as file:
            names = parsed((file.metadata() or {})["classes"])
            if not isinstance(names, dict) or not all(isinstance(each, list) for each in names.values()):
                raise ValueError("its classes are not lists")
            ids = {side: file.get_tensor(f"{side}/ids").tolist() for side in names}
            images = {side: dict(zip(ids[side], file.get_tensor(f"{side}/images"))) for side in names}
    except (safetensors.SafetensorError, OSError, KeyError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}; audit again, or delete it for a page without pictures") from None
    return Pictures(images, {side: dict(zip(ids[side], map(str, names[side]))) for side in names})
