"""An index is a folder: vectors, what they are called, and which model made them.

    index.json            model, weights digest, how images are prepared, what was skipped; written last
    vectors.safetensors   `vectors` (N, D), fp32
    ids.csv               id[,label], one row for each vector
    vectors.parquet       id[,label] and vector, where it was asked for

`.anchorhold-parts/` holds what is done while an index is being made.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor, nn

from ..errors import AnchorholdError, ModelError, RunError, SettingsError
from ..model.victim import Victim, as_victim, fingerprint_of
from ..record import atomic

__all__ = ["SCHEMA", "Index", "Named", "described", "need", "squares", "write_index", "write_parquet"]

SCHEMA = "anchorhold.index/1"
_ROWS = 65_536  # vectors that are looked at together


@dataclass(frozen=True)
class Named:
    """A model by what stands on a command line, so that an index can find it again."""

    spec: str
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    size: Sequence[int] | None = None

    def load(self) -> nn.Module:
        """The model itself."""
        from ..model.named import load_model

        return load_model(self.spec, mean=self.mean, std=self.std, size=self.size)

    def found(self) -> dict[str, Any]:
        """The same for JSON, with whole paths: a search may start in another folder."""
        path = Path(self.spec).expanduser()
        backbone, _, file = self.spec.partition("=")
        if path.exists():
            spec = str(path.resolve())
        else:
            spec = f"{backbone}={Path(file).expanduser().resolve()}" if file else self.spec
        return asdict(self) | {"spec": spec}


def described(model: nn.Module) -> dict[str, Any]:
    """What a model is, with the digest of its weights that an audit names too."""
    inner = model.module if isinstance(model, Victim) else model
    about = {"kind": type(inner).__name__, "weights": fingerprint_of(model)}
    config = getattr(inner, "config", None)
    return about | ({"config": config} if isinstance(config, dict) else {})


def squares(model: nn.Module, resize: int | None, crop: int | None) -> tuple[int, int]:
    """To which square files are resized, and what is cut out of its middle: the papers' 256 for 224, at any size."""
    size = getattr(model, "size", None) or (224, 224)
    inner = max(size) if crop is None else crop
    wide = round(inner * 256 / 224) if resize is None else resize
    if not 1 <= inner <= wide:
        raise SettingsError(
            f"a crop of {inner} does not fit images of {wide}×{wide}; give --resize and --crop to match"
        )
    return wide, inner


def need(extra: str, *modules: str) -> list[Any]:
    """Modules of an optional extra, or one line that says how to get them."""
    from importlib import import_module

    found = []
    for name in modules:
        try:
            found.append(import_module(name))
        except ImportError:
            raise SettingsError(f"this needs {name}, which is not here: pip install 'anchorhold[{extra}]'") from None
    return found


class Index:
    """An index that is complete; vectors are read from the disk as they are needed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        try:
            self.about: dict[str, Any] = json.loads((self.path / "index.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            begun = (self.path / ".anchorhold-parts").is_dir()
            todo = "the same `anchorhold embed` again goes on with it" if begun else "make one with `anchorhold embed`"
            raise RunError(f"{self.path} holds no {'complete ' if begun else ''}index: {todo}") from None
        except (OSError, ValueError) as error:
            raise RunError(f"cannot read {self.path / 'index.json'} ({error}); make the index again") from None
        schema = self.about.get("schema") if isinstance(self.about, dict) else None
        if schema != SCHEMA:
            raise RunError(f"{self.path / 'index.json'} has schema {schema!r}; this version reads {SCHEMA}")

    def __len__(self) -> int:
        return int(self.about["images"])

    @cached_property
    def rows(self) -> list[tuple[str, str]]:
        """The id and the label (or "") of each vector."""
        try:
            with open(self.path / "ids.csv", encoding="utf-8", errors="surrogateescape", newline="") as file:
                rows = [(row[0], row[1] if len(row) > 1 else "") for row in csv.reader(file)][1:]
        except (OSError, IndexError, csv.Error) as error:
            raise RunError(f"{self.path / 'ids.csv'} cannot be read ({error}); make the index again") from None
        if len(rows) != len(self):
            raise RunError(
                f"{self.path / 'ids.csv'} has {len(rows)} rows for {len(self)} vectors; make the index again"
            )
        return rows

    def parts(self, rows: int = _ROWS) -> Iterator[Tensor]:
        """The vectors, some rows at a time."""
        path = self.path / "vectors.safetensors"
        try:
            with safetensors.safe_open(path, "pt") as file:
                vectors = file.get_slice("vectors")
                if vectors.get_shape() != [len(self), self.about["dim"]]:
                    raise RunError(f"{path} holds {vectors.get_shape()} and not what index.json says; make it again")
                for start in range(0, len(self), rows):
                    yield vectors[start : start + rows]
        except (OSError, safetensors.SafetensorError) as error:
            raise RunError(f"{path} cannot be read ({error}); make the index again") from None

    def model(self, given: nn.Module | str | Path | Named | None = None) -> nn.Module:
        """The model that made the index, or the one that is given; one with other weights is refused."""
        known = self.about["model"]
        if given is None and known["named"] is None:
            raise ModelError(f"{self.path} was made from Python and does not know where its model lies; give it")
        if given is None:
            given = Named(**known["named"])
        if isinstance(given, str | Path):
            given = Named(str(given))
        if isinstance(given, Named):
            try:
                model = given.load()
            except AnchorholdError as error:
                raise ModelError(f"{error} (the model of {self.path}; --model says where it lies now)") from error
        else:
            model = given
        model = as_victim(model)
        weights = described(model)["weights"]
        if weights != known["weights"]:
            raise ModelError(
                f"{self.path} was made with model {known['weights']}, this is {weights} in weights, mean, std or size: "
                "their vectors cannot be compared; give the model that made it, or embed the images again"
            )
        return model


def write_index(
    path: Path,
    about: Mapping[str, Any],
    ids: Iterable[tuple[str, str]],
    labelled: bool,
    vectors: Iterable[Tensor],
) -> Index:
    """Put an index into a folder, index.json last: while that is missing there is no index."""
    count, dim = about["images"], about["dim"]
    header = {
        "__metadata__": {"anchorhold": json.dumps({"schema": SCHEMA, "weights": about["model"]["weights"]})},
        "vectors": {"dtype": "F32", "shape": [count, dim], "data_offsets": [0, 4 * count * dim]},
    }
    # By hand, part by part: safetensors' own writer wants all vectors in memory at once.
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
        table.writerows(row if labelled else row[:1] for row in ids)
    with atomic(path / "index.json") as temporary:
        temporary.write_text(json.dumps({"schema": SCHEMA, **about}, indent=2) + "\n", encoding="utf-8")
    return Index(path)


def write_parquet(index: Index) -> Path:
    """The same rows as vectors.parquet: id[,label] and vector, a list of fixed length."""
    pa, parquet = need("parquet", "pyarrow", "pyarrow.parquet")
    labelled = bool(index.about["labelled"])
    vector = pa.list_(pa.float32(), index.about["dim"])
    fields = [("id", pa.string()), *([("label", pa.string())] if labelled else []), ("vector", vector)]
    schema, start = pa.schema(fields), 0
    path = index.path / "vectors.parquet"
    with atomic(path) as temporary, parquet.ParquetWriter(temporary, schema) as writer:
        for part in index.parts():
            rows = index.rows[start : start + len(part)]
            start += len(part)
            # Parquet takes no name that is not Unicode.
            columns = [
                [each.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for each in column]
                for column in zip(*rows)
            ][: 2 if labelled else 1]
            flat = pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1).numpy()), type=vector)
            arrays = [*(pa.array(column, pa.string()) for column in columns), flat]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
    return path
