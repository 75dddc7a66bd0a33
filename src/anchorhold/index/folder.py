"""An index is a folder: vectors, their ids, and a description of the model that made them.

    index.json            model, weights digest, preprocessing, skipped images; written last
    vectors.safetensors   `vectors` (N, D), fp32
    ids.csv               id[,label], one row for each vector
    vectors.parquet       id[,label] and vector; only with --parquet

`.anchorhold-parts/` holds the finished blocks of an unfinished index.
"""

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import safetensors
from torch import Tensor, nn

from ..data.decode import Square
from ..data.settings import LARGEST_SIDE
from ..errors import AnchorholdError, ModelError, RunError, SettingsError
from ..extensions import USER, Origin, is_hub
from ..interface import option, worded
from ..model.encoders import preset_of
from ..model.preprocessing import INTERPOLATIONS
from ..model.wrap import Victim, as_victim, fingerprint_of, hub_of
from ..runs.fields import dig, field, parsed
from ..runs.files import regular
from ..runs.writing import atomic, csv_cell, csv_text

__all__ = ["SCHEMA", "Index", "Named", "described", "need", "write_index", "write_parquet"]

SCHEMA = "anchorhold.index/1"
_ROWS = 65_536  # vectors that are read at once

T = TypeVar("T")


@dataclass(frozen=True)
class Named:
    """A model as given on the command line, so that an index can find it again."""

    spec: str
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    size: Sequence[int] | None = None

    def load(self, origin: Origin = USER) -> nn.Module:
        """Load the model; `origin` says who named it."""
        from ..model.load import load_model

        return load_model(self.spec, mean=self.mean, std=self.std, size=self.size, origin=origin)

    def found(self) -> dict[str, Any]:
        """The same for JSON, with absolute paths, because a search may start in another folder."""
        path = Path(self.spec).expanduser()
        backbone, _, file = self.spec.partition("=")
        library, _, place = self.spec.partition(":")
        if is_hub(self.spec) or is_hub(file):
            spec = self.spec
        elif path.exists():
            spec = str(path.resolve())
        elif library == "transformers" and Path(place).expanduser().is_dir():
            spec = f"transformers:{Path(place).expanduser().resolve()}"
        else:
            spec = f"{backbone}={Path(file).expanduser().resolve()}" if file else self.spec
        return asdict(self) | {"spec": spec}


def described(model: nn.Module) -> dict[str, Any]:
    """A description of a model, with the digest of its weights that audits record too."""
    inner = model.module if isinstance(model, Victim) else model
    about = {"kind": type(inner).__name__, "weights": fingerprint_of(model), **hub_of(model)}
    about |= {"preset": preset} if (preset := preset_of(model)) else {}
    config = getattr(inner, "config", None)
    return about | ({"config": config} if isinstance(config, dict) else {})


def need(extra: str, *modules: str) -> list[Any]:
    """Import the modules of an optional extra; the error says how to install them."""
    from importlib import import_module

    found = []
    for name in modules:
        try:
            found.append(import_module(name))
        except ImportError:
            raise SettingsError(
                f"this needs {name}, which is not installed; run pip install 'anchorhold[{extra}]'"
            ) from None
    return found


class Index:
    """A complete index; vectors are read from disk when needed. `len(index)` is the number of its images.

    Args:
        path: the folder, as `ah.embed` or `anchorhold embed` made it.

    Attributes:
        path: the folder.
        about: the content of index.json: the model, its resize and crop, and the images that were skipped.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        try:
            self.about: dict[str, Any] = parsed(regular(self.path / "index.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            begun = (self.path / ".anchorhold-parts").is_dir()
            how = worded("`anchorhold embed`", "ah.embed")
            todo = f"run the same {how} to resume" if begun else f"make one with {how}"
            raise RunError(f"{self.path} holds no {'complete ' if begun else ''}index; {todo}") from None
        except (OSError, ValueError) as error:
            raise RunError(f"cannot read {self.path / 'index.json'} ({error}); make the index again") from None
        schema = self.about.get("schema") if isinstance(self.about, dict) else None
        if schema != SCHEMA:
            raise RunError(
                f"{self.path / 'index.json'} has schema {schema!r}, but this version reads {SCHEMA}; "
                "make the index again"
            )

    def field(self, place: str, kind: type[T]) -> T:
        """The value at a dotted place of index.json, checked for its type."""
        return field(self.about, place, kind, self.path / "index.json", "make the index again")

    def __len__(self) -> int:
        count = self.field("images", int)
        if not 1 <= count <= sys.maxsize:
            raise RunError(f"{self.path / 'index.json'} says that it has {count} images; make the index again")
        return count

    @property
    def dim(self) -> int:
        """The dimension of the vectors."""
        return self.field("dim", int)

    @property
    def squares(self) -> tuple[int, int]:
        """The resize and the centre crop of its images."""
        wide, inner = self.field("made_with.resize", int), self.field("made_with.crop", int)
        if not 0 <= inner <= wide <= LARGEST_SIDE or not wide:
            raise RunError(f"{self.path / 'index.json'} says resize {wide} and crop {inner}; make the index again")
        return wide, inner

    @property
    def square(self) -> int | Square:
        """How its images were resized."""
        known = self.field("made_with", dict)
        if "shape" in known:
            return self._frame()
        if not {"interpolation", "proportions"} & set(known):
            return self.squares[0]
        how, keeps = self.field("made_with.interpolation", str), self.field("made_with.proportions", bool)
        if how not in INTERPOLATIONS:
            raise RunError(f"{self.path / 'index.json'} says interpolation {how[:40]!r}; make the index again")
        return Square(self.squares[0], how, keeps)

    def _frame(self) -> Square:
        """The frame of a model whose images are not square."""
        shape = self.field("made_with.shape", str)
        sides = shape.split("×")
        known = len(sides) == 2 and all(side.isdecimal() and 1 <= int(side) <= LARGEST_SIDE for side in sides)
        if not known:
            raise RunError(f"{self.path / 'index.json'} says shape {shape[:40]!r}; make the index again")
        return Square(int(sides[0]), width=int(sides[1]))

    @cached_property
    def rows(self) -> list[tuple[str, str]]:
        """The id and the label (or "") of each vector."""
        try:
            with open(regular(self.path / "ids.csv"), encoding="utf-8", errors="surrogateescape", newline="") as file:
                rows = [(csv_text(row[0]), csv_text(row[1]) if len(row) > 1 else "") for row in csv.reader(file)][1:]
        except (OSError, IndexError, csv.Error) as error:
            raise RunError(f"{self.path / 'ids.csv'} cannot be read ({error}); make the index again") from None
        if len(rows) != len(self):
            raise RunError(
                f"{self.path / 'ids.csv'} has {len(rows)} rows for {len(self)} vectors; make the index again"
            )
        return rows

    def parts(self, rows: int = _ROWS) -> Iterator[Tensor]:
        """The vectors, in parts of some rows."""
        path = self.path / "vectors.safetensors"
        try:
            with safetensors.safe_open(regular(path), "pt") as file:
                vectors = file.get_slice("vectors")
                if vectors.get_shape() != [len(self), self.dim] or vectors.get_dtype() != "F32":
                    raise RunError(
                        f"{path} has shape {vectors.get_shape()}, which index.json contradicts; make the index again"
                    )
                for start in range(0, len(self), rows):
                    yield vectors[start : start + rows]
        except (OSError, safetensors.SafetensorError) as error:
            raise RunError(f"{path} cannot be read ({error}); make the index again") from None

    def model(self, given: nn.Module | str | Path | Named | None = None) -> nn.Module:
        """The model that made the index, or the given one if its weights are the same."""
        known, origin = self.field("model.weights", str), USER
        if given is None:
            given = self._named()
            origin = Origin(str(self.path / "index.json"), repeat=worded("--model {}", "model='{}'"))
        if isinstance(given, str | Path):
            given = Named(str(given))
        if isinstance(given, Named) and given == Named(str(dig(self.about, "model", "named", "spec"))):
            given = self._named()  # the user repeats its name; mean, std and size are in index.json
        if isinstance(given, Named):
            try:
                model = given.load(origin)
            except RunError:
                raise
            except AnchorholdError as error:
                raise ModelError(
                    f"{error} (the model of {self.path}; give its new location with {option('model')})"
                ) from error
        else:
            model = given
        model = as_victim(model)
        weights = described(model)["weights"]
        if weights != known:
            raise ModelError(
                f"{self.path} was made with model {known}, but this is {weights}: weights, mean, std or size differ, "
                "so vectors cannot be compared; give the model that made it, or embed the images again"
            )
        return model

    def _named(self) -> Named:
        """The model that index.json names."""
        if field(self.about, "model", dict, self.path / "index.json", "make the index again").get("named") is None:
            raise ModelError(
                f"{self.path} was made in Python and does not record where its model is; give {option('model')}"
            )

        def numbers(name: str, kind: type[float]) -> list[Any] | None:
            if self.field("model.named", dict).get(name) is None:
                return None
            values = dict(enumerate(self.field(f"model.named.{name}", list)))
            where = f"model.named.{name} of {self.path / 'index.json'}"
            return [field({"number": v}, "number", kind, where, "make the index again") for v in values.values()]

        mean, std, size = numbers("mean", float), numbers("std", float), numbers("size", int)
        return Named(self.field("model.named.spec", str), mean, std, size)


def write_index(
    path: Path,
    about: Mapping[str, Any],
    ids: Iterable[tuple[str, str]],
    labelled: bool,
    vectors: Iterable[Tensor],
) -> Index:
    """Write an index into a folder. index.json comes last; without it there is no index."""
    count, dim = about["images"], about["dim"]
    header = {
        "__metadata__": {"anchorhold": json.dumps({"schema": SCHEMA, "weights": about["model"]["weights"]})},
        "vectors": {"dtype": "F32", "shape": [count, dim], "data_offsets": [0, 4 * count * dim]},
    }
    # Written part by part, because safetensors' own writer needs all vectors in memory.
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with atomic(path / "vectors.safetensors") as temporary, open(temporary, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for part in vectors:
            file.write(part.numpy().astype("<f4", copy=False).tobytes())
    with (
        atomic(path / "ids.csv") as temporary,
        open(temporary, "w", encoding="utf-8", errors="surrogateescape", newline="") as text,
    ):
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["id", "label"] if labelled else ["id"])
        table.writerows([csv_cell(each) for each in (row if labelled else row[:1])] for row in ids)
    with atomic(path / "index.json") as temporary:
        temporary.write_text(json.dumps({"schema": SCHEMA, **about}, indent=2) + "\n", encoding="utf-8")
    return Index(path)


def write_parquet(index: Index) -> Path:
    """Write the rows as vectors.parquet: id[,label] and vector, a list of fixed length."""
    pa, parquet = need("parquet", "pyarrow", "pyarrow.parquet")
    labelled = index.field("labelled", bool)
    vector = pa.list_(pa.float32(), index.dim)
    fields = [("id", pa.string()), *([("label", pa.string())] if labelled else []), ("vector", vector)]
    schema, start = pa.schema(fields), 0
    path = index.path / "vectors.parquet"
    with atomic(path) as temporary, parquet.ParquetWriter(temporary, schema) as writer:
        for part in index.parts():
            rows = index.rows[start : start + len(part)]
            start += len(part)
            # Parquet accepts only Unicode names.
            columns = [
                [each.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for each in column]
                for column in zip(*rows)
            ][: 2 if labelled else 1]
            flat = pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1).numpy()), type=vector)
            arrays = [*(pa.array(column, pa.string()) for column in columns), flat]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
    return path
