"""From image files to bytes, and what the processes that do it run.

A process that reads images imports this module and no more, so it must not import torch.
"""

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Bad", "begin", "fill", "fill_shared", "pixels_of", "rgb", "upright", "why_unreadable"]

Bad = list[tuple[int, str]]  # rows whose file cannot be read, with the reason

_shared: Any = None  # in a worker: the memory it writes to, if any; never set in the reader


def pixels_of(file: Any, size: int) -> Any:
    """One file, by its path or open, as a (size, size, 3) array of bytes."""
    import numpy as np
    from PIL import Image

    with Image.open(file) as opened:
        image = rgb(upright(opened))
        if image.size != (size, size):
            image = image.resize((size, size), Image.Resampling.BILINEAR)
        return np.asarray(image)


def upright(image: "Image") -> "Image":
    """The image as the camera was held; a broken EXIF block says nothing about that."""
    from PIL import Image

    image.load()  # first: some formats know their EXIF only then
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
    """8-bit RGB; alpha is dropped, as most training code does: a model must see what it was trained on."""
    import numpy as np
    from PIL import Image

    if image.mode == "F":
        raise ValueError("its pixels are floats of unknown range, save it with 8 bits")
    if image.mode.startswith("I"):  # Pillow's own conversion would clip 16-bit grey at 255, to nearly all white
        grey = np.asarray(image)
        if grey.min() < 0 or grey.max() > 65535:
            raise ValueError("its pixels have more than 16 bits, save it with 8 bits")
        return Image.fromarray((grey / 257).round().astype(np.uint8)).convert("RGB")
    if image.mode in ("P", "PA"):  # a palette with transparency goes by RGBA, or Pillow warns
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


def why_unreadable(error: Exception) -> str:
    """What made `pixels_of` fail, in a few words without the path."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):  # its own words repeat the path
        return "not an image"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]


def fill(rows: Any, paths: list[Path], size: int) -> Bad:
    """Put the images of files into their rows (None: only look whether they can be read); which are bad, and why."""
    bad = []
    for row, path in enumerate(paths):
        try:
            pixels = pixels_of(path, size)
            if rows is not None:
                rows[row] = pixels
        except Exception as error:  # what a broken file makes Pillow raise is without end
            bad.append((row, why_unreadable(error)))
    return bad


# ---- in a worker -----------------------------------------------------------------------------------------


def begin(place: tuple[Any, tuple[int, ...]] | None, reader: int) -> None:
    """What a worker does first: it finds the shared memory, if any, and sees to it that it ends with the reader."""
    import numpy as np

    global _shared
    _shared = None if place is None else np.frombuffer(place[0], np.uint8).reshape(place[1])
    # Ctrl-C goes to every process of a terminal, and torchrun's end to every process of a group: the reader ends its
    # step and then its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgrp()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()


def fill_shared(place: int | slice, paths: list[Path], size: int) -> Bad:
    """`fill` into one place of the shared memory."""
    return fill(None if _shared is None else _shared[place], paths, size)


def _watch(reader: int) -> None:
    """End with the reader, however it ends: a worker that waits for work would wait for ever."""
    while os.getppid() == reader:
        time.sleep(1)
    os._exit(1)
