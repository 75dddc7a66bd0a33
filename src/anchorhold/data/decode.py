"""Decoding of image files, also in worker processes.

A worker process imports only this module, so it must not import torch.
"""

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import lacks_memory
from ..runs.files import regular

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "Bad",
    "Square",
    "begin",
    "fill",
    "fill_shared",
    "pixels_of",
    "rgb",
    "shape_of",
    "square",
    "squared",
    "upright",
    "why_unreadable",
]

Bad = list[tuple[int, str]]  # (row, reason) of each file that cannot be read


@dataclass(frozen=True)
class Square:
    """How an image becomes a square, where that is not the usual: bilinear, without keeping its proportions.

    With a `width` it becomes side × width: it is resized so that it covers those, and its centre is cut out.
    """

    side: int
    interpolation: str = "bilinear"  # bilinear, bicubic, lanczos or nearest
    proportions: bool = False  # resize the shorter side, then cut out the centre
    width: int = 0  # for a model whose images are not square; `side` is then their height


def squared(side: int, interpolation: str = "bilinear", proportions: bool = False) -> int | Square:
    """The side alone for the usual way to resize, else a Square."""
    return side if interpolation == "bilinear" and not proportions else Square(side, interpolation, proportions)


def shape_of(size: int | Square) -> tuple[int, int]:
    """Height and width of the frames."""
    return (size.side, size.width or size.side) if isinstance(size, Square) else (size, size)


_shared: Any = None  # in a worker: the memory that it writes to, if any; never set in the parent


def pixels_of(file: Any, size: int | Square) -> Any:
    """One image file, given as a path or open, as a (height, width, 3) array of bytes."""
    from PIL import Image

    with Image.open(file if hasattr(file, "read") else regular(file)) as opened:
        return square(opened, size)


def square(image: "Image", size: int | Square) -> Any:
    """An image as a (height, width, 3) array of bytes: upright, RGB, resized without keeping its proportions.

    A Square may keep them: as torchvision's Resize(side) and CenterCrop(side) do. With a width it always does.
    """
    import numpy as np
    from PIL import Image

    image = rgb(upright(image))
    how = size if isinstance(size, Square) else Square(size)
    side, (width, height) = how.side, image.size
    tall, wide = shape_of(how)
    wanted = (wide, tall)
    if how.width:
        scale = max(tall / height, wide / width)
        wanted = (max(wide, round(width * scale)), max(tall, round(height * scale)))
    elif how.proportions:
        wanted = (side, int(side * height / width)) if width <= height else (int(side * width / height), side)
    if image.size != wanted:
        image = image.resize(wanted, Image.Resampling[how.interpolation.upper()])
    left, top = (round((length - kept) / 2) for length, kept in zip(wanted, (wide, tall)))
    return np.asarray(image if wanted == (wide, tall) else image.crop((left, top, left + wide, top + tall)))


def upright(image: "Image") -> "Image":
    """The image rotated by its EXIF orientation; a broken EXIF block is ignored."""
    from PIL import Image

    image.load()  # first, because some formats have their EXIF only after loading
    try:
        orientation = image.getexif().get(0x0112)
    except Exception:
        return image
    turn = Image.Transpose
    turns = {
        2: turn.FLIP_LEFT_RIGHT,
        3: turn.ROTATE_180,
        4: turn.FLIP_TOP_BOTTOM,
        5: turn.TRANSPOSE,
        6: turn.ROTATE_270,
        7: turn.TRANSVERSE,
        8: turn.ROTATE_90,
    }
    return image.transpose(turns[orientation]) if orientation in turns else image


def rgb(image: "Image") -> "Image":
    """The image in 8-bit RGB; alpha is dropped, as in most training code."""
    import numpy as np
    from PIL import Image

    if image.mode == "F":
        raise ValueError("its pixels are floats of unknown range; save it with 8 bits")
    if image.mode.startswith("I"):  # Pillow would clip 16-bit grey at 255, to nearly all white
        grey = np.asarray(image)
        if grey.min() < 0 or grey.max() > 65535:
            raise ValueError("its pixels have more than 16 bits; save it with 8 bits")
        return Image.fromarray((grey / 257).round().astype(np.uint8)).convert("RGB")
    if image.mode in ("P", "PA"):  # by way of RGBA, or Pillow warns about palettes with transparency
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


def why_unreadable(error: Exception) -> str:
    """The reason why `pixels_of` failed, in a few words without the path."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):  # its message repeats the path
        return "not an image"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]


def fill(rows: Any, paths: list[Path], size: int | Square) -> Bad:
    """Decode files into rows (None: only check that they can be read); returns the bad ones with reasons."""
    bad = []
    for row, path in enumerate(paths):
        try:
            pixels = pixels_of(path, size)
            if rows is not None:
                rows[row] = pixels
        except Exception as error:  # Pillow may raise anything on a broken file
            if lacks_memory(error):
                raise MemoryError(f"at {path}") from None
            bad.append((row, why_unreadable(error)))
    return bad


# ---- in a worker -----------------------------------------------------------------------------------------


def begin(place: tuple[Any, tuple[int, ...]] | None, reader: int) -> None:
    """Initialise a worker: attach the shared memory, if any, and end when the parent (`reader`) ends."""
    import numpy as np

    global _shared
    _shared = None if place is None else np.frombuffer(place[0], np.uint8).reshape(place[1])
    # Ctrl-C reaches every process of a terminal, and torchrun's SIGTERM every process of a group. Workers ignore both
    # until the parent has finished its step and ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgrp()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()


def fill_shared(place: int | slice, paths: list[Path], size: int | Square) -> Bad:
    """`fill` one place of the shared memory."""
    return fill(None if _shared is None else _shared[place], paths, size)


def _watch(reader: int) -> None:
    """End this process when the parent has ended; otherwise an idle worker would wait for ever."""
    while os.getppid() == reader:
        time.sleep(1)
    os._exit(1)
