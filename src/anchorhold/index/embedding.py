"""embed(): a folder, a CSV or a tar of images becomes an index of vectors.

Images are embedded in fixed blocks, and what a block gave is a file of its own. Killed at any moment, the same call
does the blocks that have none, and ends with the same bytes as one that was left alone.
"""

import io
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import __version__
from ..console import Report, Silent, duration
from ..data.decode import pixels_of, why_unreadable
from ..data.store import centre_crop
from ..data.workers import cores
from ..device import device_named, living_on, repeatable
from ..errors import AnchorholdError, DataError, Interrupted, ModelError
from ..model.chunked import chunked
from ..model.frozen import Embed, embed_all, frozen
from ..model.victim import as_victim, reason_of
from ..ranks import Ranks, joined
from ..record import provenance
from ..settings import check
from .folder import Index, Named, described, need, squares, write_parquet
from .parts import Parts, refuse_other, remove_parts
from .sources import Source, digest_of, shown, source_at

__all__ = ["embed", "vectors_of"]

_BATCHES = 4  # in a block: what a kill can cost at most
_AHEAD = 2**28  # bytes of images that are held before they are needed, as they are packed and decoded


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
    """Vectors and ids of all images of `source` (a folder, a CSV or a tar), as an index in the folder `out`.

    Files are resized to a square and its middle is cut out, by default as the model wants it. `out` may hold the
    beginning of the same work, which then goes on. With `parquet` the rows are written as vectors.parquet as well.
    """
    check(on_bad_image in ("fail", "skip"), f"on_bad_image is {on_bad_image!r}; choose fail or skip")
    check(batch >= 1, f"batch must be at least 1, got {batch}")
    if parquet:
        need("parquet", "pyarrow")
    out, where = Path(out).expanduser(), device_named(device)
    ranks = joined(where)
    report = report if report and ranks.first else Silent()
    named = Named(str(model)) if isinstance(model, str | Path) else model if isinstance(model, Named) else None
    victim = as_victim(named.load() if named is not None else model)  # type: ignore[arg-type]
    wide, inner = squares(victim, resize, crop)
    images = source_at(source)
    for note in images.notes:
        report.say(note)
    about_model = described(victim)
    made_with = {"model": about_model["weights"], "resize": wide, "crop": inner}
    items = digest_of(images.items)
    if ranks.once(lambda: (out / "index.json").exists()):
        index = Index(out)
        known = index.about["made_with"] | {"source": index.about["source"]["digest"]}
        refuse_other(out, known, {**made_with, "source": items})
        if ranks.first:
            remove_parts(out)  # where it was killed between the two
        report.say(f"{out} is complete already")
    else:
        _refuse_bad(images, on_bad_image)
        made_with |= {"batch": batch, "device": where.type, "version": __version__}  # for the last bit
        parts = Parts(out, images.items, made_with, _BATCHES * batch)
        begun = time.monotonic()
        with living_on(victim, where), repeatable(), frozen(victim) as view:
            try:
                run = chunked(view, batch)
                _fill(parts, run, victim, images, (wide, inner), batch, where, on_bad_image, report, ranks)
            except KeyboardInterrupt:
                raise Interrupted(f"stopped; the same command with --out {out} goes on from here") from None
        about = {
            "model": about_model | {"named": None if named is None else named.found()},
            "source": {"place": str(images.place), "images": len(images.items), "digest": items},
            "made_with": made_with,
            "labelled": images.labelled,
            "provenance": provenance(where),
        }
        ranks.wait()  # until every part is there
        ranks.once(lambda: len(parts.finish(about, images.labelled)))
        index = Index(out)
        report.say(f"{len(index):,} vectors of {index.about['dim']} numbers in {duration(time.monotonic() - begun)}")
    skipped = index.about["skipped"]
    if skipped:
        name, reason = skipped[0]
        everyone = f"all named in {out / 'index.json'}"
        report.say(f"skipped {len(skipped):,} unreadable images, {everyone}; first: {shown(name)}: {reason}")
    if parquet and ranks.first and not (out / "vectors.parquet").exists():
        write_parquet(index)
    return index


def vectors_of(run: Embed, model: nn.Module, frames: Tensor, crop: int, device: torch.device) -> Tensor:
    """Vectors (N, D) of byte frames (N, H, W, 3), on the CPU; a model of one channel gets their mean."""
    images = centre_crop(frames.to(device), crop)
    mean = getattr(model, "mean", None)
    if isinstance(mean, Tensor) and len(mean) == 1:
        images = images.mean(1, keepdim=True)
    try:
        return embed_all(run, [images]).float().cpu()
    except (AnchorholdError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # it is their code
        raise ModelError(f"the model fails on images of shape {tuple(images.shape)} ({reason_of(error)})") from error


def _refuse_bad(images: Source, on_bad_image: str) -> None:
    """Say at once what a look at the files shows; the rest comes to light when they are decoded."""
    bad = [item for item in images.items if item.problem]
    if bad and (on_bad_image == "fail" or len(bad) == len(images.items)):
        todo = "mend or remove them"
        if len(bad) < len(images.items):
            todo += ", or go on without such images by --on-bad-image skip"
        raise DataError(
            f"{len(bad):,} of {len(images.items):,} images of {images.place} cannot be read, "
            f"the first is {shown(bad[0].id)}: {bad[0].problem}; {todo}"
        )


def _fill(
    parts: Parts,
    run: Embed,
    model: nn.Module,
    images: Source,
    sides: tuple[int, int],
    batch: int,
    device: torch.device,
    on_bad_image: str,
    report: Report,
    ranks: Ranks,
) -> None:
    """Do the blocks that have no part yet, each by one rank."""
    todo = ranks.once(lambda: parts.todo(whole=on_bad_image == "fail"))
    done = len(images.items) - sum(len(parts.block(number)) for number in todo)
    if done and todo:
        report.say(f"{done:,} of {len(images.items):,} images were done before")
    with report.task("embedding", len(images.items), done) as advance:
        mine = sorted(todo)[ranks.rank :: ranks.size]
        own = set(mine)
        frames = _decoded(images, lambda at: at // parts.size in own, sides[0], parts.size)
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
                            f"cannot read {shown(block[at - first].id)} of {images.place}: {frame}; mend or remove it, "
                            "or go on without such images by --on-bad-image skip"
                        )
                    else:
                        bad.append((block[at - first].id, frame))
                    if pixels and (len(pixels) == batch or at - first == len(block) - 1):
                        vectors.append(vectors_of(run, model, torch.stack(pixels), sides[1], device))
                        pixels = []
                        if at - first < len(block) - 1:
                            advance(done + at - first + 1, "")
                whole = torch.cat(vectors) if vectors else torch.empty(0, 0)
                odd = (~whole.isfinite()).any(1).nonzero().flatten().tolist()
                if odd:
                    name = shown(block[kept[odd[0]]].id)
                    raise ModelError(f"{len(odd)} vectors are not finite, the first is of {name}; look at the model")
                parts.keep(number, whole, kept, bad)
                done += len(block) * ranks.size
                advance(min(done, len(images.items)), "")
        finally:
            frames.close()


def _decoded(
    images: Source, wanted: Callable[[int], bool], size: int, most: int
) -> Generator[tuple[int, Any], None, None]:
    """The number of each wanted image and its bytes (or the reason why there are none), in order, ahead of need.

    At most `most` of them, and `_AHEAD` bytes, but always one: what a tar gives is in memory before it is decoded.
    """

    def pixels(what: Path | io.BytesIO) -> Any:
        try:
            return pixels_of(what, size).copy()
        except Exception as error:  # what a broken file makes Pillow raise is without end
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
            own = 3 * size**2 + (len(what.getbuffer()) if isinstance(what, io.BytesIO) else 0)
            waiting.append((at, own, images.items[at].problem if what is None else threads.submit(pixels, what)))
            held += own
            del what
            while len(waiting) > 1 and (len(waiting) > most or held > _AHEAD):
                yield oldest()
        while waiting:
            yield oldest()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
