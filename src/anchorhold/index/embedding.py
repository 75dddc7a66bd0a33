"""embed(): an index of vectors from a folder, a CSV or a tar of images.

Images are embedded in fixed blocks, and each finished block is saved to its own file. After a kill at any moment, the
same call embeds the missing blocks, and ends with the same bytes as an uninterrupted one.
"""

import io
import math
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..console import Report, Silent, duration, shown
from ..data.decode import Square, pixels_of, shape_of, why_unreadable
from ..data.workers import cores
from ..device import computer_of, device_named, living_on, repeatable
from ..distributed import Ranks, joined
from ..errors import AnchorholdError, DataError, Interrupted, ModelError, check, lacks_memory
from ..extensions import reason_of
from ..interface import argument, option
from ..model.chunked import chunked
from ..model.frozen import Embed, embed_all, frozen
from ..model.preprocessing import Preprocessing, preprocessing_of
from ..model.wrap import as_victim
from ..runs.locks import one_writer
from ..runs.provenance import provenance
from ..version import __version__
from .folder import Index, Named, described, need, write_parquet
from .sources import Source, digest_of, source_at
from .unfinished import Parts, refuse_other, remove_parts, told_of

__all__ = ["embed", "vectors_of"]

_BATCHES = 4  # per block, the most that a kill can lose
_AHEAD = 2**28  # bytes of packed and decoded images that are read in advance


def embed(
    model: nn.Module | str | Path | Named,
    source: str | Path,
    out: str | Path,
    *,
    resize: int | None = None,
    crop: int | None = None,
    on_bad_image: Literal["fail", "skip"] = "fail",
    batch: int = 128,
    parquet: bool = False,
    device: str = "auto",
    report: Report | None = None,
) -> Index:
    """Embed all images of `source` into an index in the folder `out`.

    Files go through the model's own preprocessing. If `out` holds an unfinished index of the same images, the work
    resumes.

    Args:
        model: a model, a run folder, a file of weights, or what else `ah.load` takes.
        source: a folder, a CSV or a tar of images.
        out: the folder of the index; give the same one to resume.
        resize: resize files to this square before the crop, instead of the model's; encoders resize the shorter side.
        crop: the side of the square that the model sees, instead of the model's.
        on_bad_image: fail or skip.
        batch: images embedded at a time.
        parquet: also write vectors.parquet; pyarrow has to be installed.
        device: auto, cpu, cuda or cuda:N.
        report: receives progress messages, such as `ah.Console()`; None is silent.

    >>> import tempfile
    >>> from PIL import Image
    >>> from anchorhold import Embedder
    >>> place = Path(tempfile.mkdtemp())
    >>> for name, colour in {"red": "#c00", "green": "#0c0", "blue": "#00c"}.items():
    ...     Image.new("RGB", (8, 8), colour).save(place / f"{name}.png")
    >>> index = embed(Embedder("small", 8, size=8), place, place / "index", device="cpu")
    >>> len(index), index.dim
    (3, 8)
    """
    check(on_bad_image in ("fail", "skip"), f"{argument('on_bad_image')} is {on_bad_image!r}; choose fail or skip")
    check(batch >= 1, f"{argument('batch')} must be at least 1, got {batch}")
    if parquet:
        need("parquet", "pyarrow")
    out, where = Path(out).expanduser(), device_named(device)
    ranks = joined(where)
    report = report if report and ranks.first else Silent()
    named = Named(str(model)) if isinstance(model, str | Path) else model if isinstance(model, Named) else None
    victim = as_victim(named.load() if named is not None else model)  # type: ignore[arg-type]
    way = preprocessing_of(victim).told(resize, crop)
    images = source_at(source)
    for note in images.notes:
        report.say(note)
    about_model = described(victim)
    made_with = {"model": about_model["weights"], "resize": way.resize, "crop": way.crop, **way.unusual()}
    items = digest_of(images.items)
    with one_writer(out, ranks, report):
        if ranks.once(lambda: (out / "index.json").exists()):
            index = Index(out)
            known = index.field("made_with", dict) | {"source": index.field("source.digest", str)}
            refuse_other(out, known, {**made_with, "source": items})
            if ranks.first:
                remove_parts(out)  # left behind by a kill just before the end
            report.say(f"{out} is already complete")
        else:
            _refuse_bad(images, on_bad_image)
            made_with |= {
                "batch": batch,
                "device": where.type,
                "version": __version__,
            }  # these change the last bits of vectors
            parts = Parts(out, images.items, made_with, _BATCHES * batch)
            begun = time.monotonic()
            with living_on(victim, where), repeatable(), frozen(victim) as view:
                try:
                    vectors = partial(vectors_of, chunked(view, batch), way, device=where)
                    _fill(parts, vectors, way, images, batch, on_bad_image, report, ranks)
                except KeyboardInterrupt:
                    raise Interrupted(f"stopped; to resume, do the same again with {option('out', str(out))}") from None
            about = {
                "model": about_model | {"named": None if named is None else named.found()},
                "source": {"place": str(images.place), "images": len(images.items), "digest": items},
                "made_with": made_with,
                "preprocessing": way.described(),
                "labelled": images.labelled,
                "provenance": provenance(computer_of(where)),
            }
            ranks.wait()  # until all ranks have saved their parts
            ranks.once(lambda: len(parts.finish(about, images.labelled)))
            index = Index(out)
            count = f"{len(index):,} vector{'s' * (len(index) != 1)}"
            report.say(f"{count} of {index.dim} dimensions in {duration(time.monotonic() - begun)}")
        skipped = index.field("skipped", list)
        if skipped:
            count = f"{len(skipped):,} unreadable image{'s' * (len(skipped) > 1)}"
            report.say(f"skipped {count}, listed in {out / 'index.json'}; the first: {told_of(skipped[0])}")
        if parquet and ranks.first and not (out / "vectors.parquet").exists():
            write_parquet(index)
        return index


def vectors_of(run: Embed, way: Preprocessing, frames: Tensor, device: torch.device) -> Tensor:
    """Vectors (N, D) of byte frames (N, H, W, 3), on the CPU; a model of one channel gets their mean over RGB."""
    images = way.views(frames.to(device))
    try:
        return embed_all(run, [images]).float().cpu()
    except Exception as error:  # user code may raise anything
        if isinstance(error, AnchorholdError) or lacks_memory(error):
            raise
        raise ModelError(
            f"the model fails on images of shape {tuple(images.shape)} ({reason_of(error)}); "
            f"check the model and {argument('size')}"
        ) from error


def _refuse_bad(images: Source, on_bad_image: str) -> None:
    """Report missing and empty files at once; other defects are found when files are decoded."""
    bad = [item for item in images.items if item.problem]
    if bad and (on_bad_image == "fail" or len(bad) == len(images.items)):
        todo = "repair or remove them"
        if len(bad) < len(images.items):
            todo += f", or skip such images with {option('on_bad_image', 'skip')}"
        raise DataError(
            f"{len(bad):,} of {len(images.items):,} images of {images.place} cannot be read, "
            f"the first is {shown(bad[0].id)}: {bad[0].problem}; {todo}"
        )


def _fill(
    parts: Parts,
    vectors_of_frames: Callable[[Tensor], Tensor],
    way: Preprocessing,
    images: Source,
    batch: int,
    on_bad_image: str,
    report: Report,
    ranks: Ranks,
) -> None:
    """Embed the missing blocks, each on one rank."""
    todo = ranks.once(lambda: parts.todo(whole=on_bad_image == "fail"))
    done = len(images.items) - sum(len(parts.block(number)) for number in todo)
    if done and todo:
        report.say(f"{done:,} of {len(images.items):,} images are already embedded")
    if way.assumed:
        report.say(f"the model has no record of its preprocessing; its size suggests: {way}")
    with report.task("embedding", len(images.items), done) as advance:
        mine = sorted(todo)[ranks.rank :: ranks.size]
        own = set(mine)
        frames = _decoded(images, lambda at: at // parts.size in own, way.square, parts.size)
        try:
            for number in mine:
                first, block = number * parts.size, parts.block(number)
                kept, pixels, bad, vectors = [], [], [], []
                for at, frame in islice(frames, len(block)):
                    if not isinstance(frame, str):
                        kept.append(at - first)
                        pixels.append(torch.from_numpy(frame))
                    elif on_bad_image == "fail":
                        raise DataError(
                            f"cannot read {shown(block[at - first].id)} of {images.place}: {frame}; "
                            f"repair or remove it, or skip such images with {option('on_bad_image', 'skip')}"
                        )
                    else:
                        bad.append((block[at - first].id, frame))
                    if pixels and (len(pixels) == batch or at - first == len(block) - 1):
                        vectors.append(vectors_of_frames(torch.stack(pixels)))
                        pixels = []
                        if at - first < len(block) - 1:
                            advance(done + at - first + 1, "")
                whole = torch.cat(vectors) if vectors else torch.empty(0, 0)
                odd = (~whole.isfinite()).any(1).nonzero().flatten().tolist()
                if odd:
                    name = shown(block[kept[odd[0]]].id)
                    count = "1 vector is" if len(odd) == 1 else f"{len(odd)} vectors are"
                    raise ModelError(f"{count} not finite, the first is of {name}; check the model")
                parts.keep(number, whole, kept, bad)
                done += len(block) * ranks.size
                advance(min(done, len(images.items)), "")
        finally:
            frames.close()


def _decoded(
    images: Source, wanted: Callable[[int], bool], size: int | Square, most: int
) -> Generator[tuple[int, Any], None, None]:
    """The number of each wanted image and its bytes (or the reason why there are none), in order, ahead of need.

    At most `most` of them, and `_AHEAD` bytes, but always one: what a tar gives is in memory before it is decoded.
    """

    def pixels(what: Path | io.BytesIO) -> Any:
        try:
            return pixels_of(what, size).copy()
        except Exception as error:  # Pillow may raise anything on a broken file
            if lacks_memory(error):
                raise
            return shown(why_unreadable(error))

    waiting: deque[tuple[int, int, Future[Any] | str]] = deque()
    held = 0
    threads = ThreadPoolExecutor(cores())

    def oldest() -> tuple[int, Any]:
        nonlocal held
        at, own, found = waiting.popleft()
        held -= own
        return at, found if isinstance(found, str) else found.result()

    try:
        for at, what in images.read(wanted):
            own = 3 * math.prod(shape_of(size)) + (len(what.getbuffer()) if isinstance(what, io.BytesIO) else 0)
            waiting.append((at, own, images.items[at].problem if what is None else threads.submit(pixels, what)))
            held += own
            del what
            while len(waiting) > 1 and (len(waiting) > most or held > _AHEAD):
                yield oldest()
        while waiting:
            yield oldest()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
