"""search(): the nearest images of an index to a query image."""

from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..console import shown
from ..data.decode import Square, pixels_of, why_unreadable
from ..device import device_named, living_on
from ..display import html_table
from ..errors import DataError, check, lacks_memory
from ..geometry import retrieve
from ..interface import argument
from ..model.frozen import frozen
from ..model.preprocessing import preprocessing_of
from .embedding import vectors_of
from .folder import Index, Named, need
from .sources import problem_of

__all__ = ["Found", "Hit", "search"]


@dataclass(frozen=True)
class Hit:
    """One image of an index. Ranks start at 1; distances are Euclidean between unit vectors, from 0 to 2."""

    rank: int
    distance: float
    id: str
    label: str = ""


@dataclass(frozen=True)
class Found:
    """The nearest images to a query, nearest first; str() gives a table.

    Attributes:
        image: the file of the query.
        index: the folder of the index.
        hits: the images found; each has `rank`, `distance`, `label` and `id`.
    """

    image: str
    index: str
    hits: tuple[Hit, ...]

    def __str__(self) -> str:
        labelled = any(hit.label for hit in self.hits)
        lines = [f"{'rank':>6}  {'distance':>8}  {'label':24}  id" if labelled else f"{'rank':>6}  {'distance':>8}  id"]
        for hit in self.hits:
            label = f"{shown(hit.label)[:24]:24}  " if labelled else ""
            lines.append(f"{hit.rank:>6}  {hit.distance:>8.4f}  {label}{shown(hit.id)}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        first = f", the first {shown(self.hits[0].id)} at {self.hits[0].distance:.4f}" if self.hits else ""
        return f"<Found {len(self.hits)} images nearest to {shown(self.image)}{first}>"

    def _repr_html_(self) -> str:
        rows = [[hit.rank, f"{hit.distance:.4f}", hit.label, hit.id] for hit in self.hits]
        return html_table(f"nearest to {self.image}", ["rank", "distance", "label", "id"], rows)


def search(
    index: str | Path | Index,
    image: str | Path,
    k: int = 10,
    *,
    model: nn.Module | str | Path | Named | None = None,
    backend: Literal["exact", "faiss"] = "exact",
    device: str = "auto",
) -> Found:
    """The `k` images of an index that are nearest to a query image, or all if there are fewer.

    The query gets the same model, resize and crop as the indexed images.

    Args:
        index: the folder of an index, or what `ah.embed` returned.
        image: the file of the query.
        k: how many images to return.
        model: needed if the model has moved, or if the index was made from a module. Other weights are refused.
        backend: exact, or faiss where it is installed. Both return the same images.
        device: auto, cpu, cuda or cuda:N.

    >>> import tempfile
    >>> from PIL import Image
    >>> from anchorhold import Embedder, embed
    >>> place, model = Path(tempfile.mkdtemp()), Embedder("small", 8, size=8)
    >>> for name, colour in {"red": "#c00", "pink": "#c22", "blue": "#00c"}.items():
    ...     Image.new("RGB", (8, 8), colour).save(place / f"{name}.png")
    >>> index = embed(model, place, place / "index", device="cpu")
    >>> [hit.id for hit in search(index, place / "red.png", k=2, model=model, device="cpu").hits]
    ['red.png', 'pink.png']
    """
    check(isinstance(k, Integral) and k >= 1, f"{argument('k')} must be a whole number of at least 1, got {k!r}")
    check(backend in ("exact", "faiss"), f"{argument('backend')} is {backend!r}; choose exact or faiss")
    (faiss,) = need("faiss", "faiss") if backend == "faiss" else (None,)
    index = index if isinstance(index, Index) else Index(index)
    path = Path(image).expanduser()
    wide, inner = index.squares
    frame = _frame(path, index.square)
    victim, where = index.model(model), device_named(device)
    way = preprocessing_of(victim).told(wide, inner)
    with living_on(victim, where), frozen(victim) as run:
        query = vectors_of(run, way, frame, where)
    k = min(k, len(index))
    distances, places = _nearest(index, query, k) if faiss is None else _by_faiss(faiss, index, query, k)
    hits = [
        Hit(rank, distance, *index.rows[place])
        for rank, (distance, place) in enumerate(zip(distances.tolist(), places.tolist()), start=1)
    ]
    return Found(str(path), str(index.path), tuple(hits))


def _frame(path: Path, size: int | Square) -> Tensor:
    *_, problem = problem_of(path)
    try:
        pixels = None if problem else pixels_of(path, size).copy()
    except Exception as error:  # Pillow may raise anything on a broken file
        if lacks_memory(error):
            raise
        problem = shown(why_unreadable(error))
    if problem:
        raise DataError(f"cannot read {shown(str(path))}: {problem}; give an image file")
    return torch.from_numpy(pixels).unsqueeze(0)


def _nearest(index: Index, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Exact distances and places of the k nearest; part by part, since the index may not fit into memory."""
    distances, places, start = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.long), 0
    for part in index.parts():
        # float64, because in fp32 |x|² + |y|² − 2xy gives an image a distance of 1e-3 to itself.
        found = retrieve(query.double(), part.double(), min(k, len(part)))
        distances = torch.cat([distances, found.distances[0]])
        places = torch.cat([places, found.ids[0] + start])
        distances, order = distances.sort(stable=True)  # ties stay in the order of the index
        distances, places, start = distances[:k], places[order[:k]], start + len(part)
    return distances, places


def _by_faiss(faiss: Any, index: Index, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same with faiss's flat index, on the CPU and with torch's number of threads."""
    faiss.omp_set_num_threads(torch.get_num_threads())
    flat = faiss.IndexFlatL2(index.dim)
    for part in index.parts():
        flat.add(part.numpy())
    squared, places = flat.search(query.numpy(), k)
    return torch.from_numpy(squared[0]).clamp(min=0).sqrt(), torch.from_numpy(places[0])
