"""The package that users install: what the sdist and the wheel hold, and that the installed copy runs.

The wheel is built from the unpacked sdist, as an installer would do it. No network is needed.
"""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from anchorhold.version import __version__

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "anchorhold"
LARGEST = 1_000_000  # bytes of one packaged file


def python(*arguments: str, cwd: Path, path: str = "") -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONPATH": path} if path else {}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    place = tmp_path_factory.mktemp("sdist")
    python("-m", "hatchling", "build", "-t", "sdist", "-d", str(place), cwd=ROOT)
    (archive,) = place.glob("*.tar.gz")
    assert archive.name == f"anchorhold-{__version__}.tar.gz"
    with tarfile.open(archive) as file:
        file.extractall(place, filter="data")
    return place / f"anchorhold-{__version__}"


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    python("-m", "hatchling", "build", "-t", "wheel", "-d", str(place), cwd=sdist)
    (archive,) = place.glob("*.whl")
    assert archive.name == f"anchorhold-{__version__}-py3-none-any.whl"
    return archive


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages; a wheel of pure Python is installed by unpacking it."""
    place = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(place)
    return place


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_wheel_holds_the_package_and_nothing_else(installed: Path) -> None:
    about = f"anchorhold-{__version__}.dist-info"
    assert {path.name for path in installed.iterdir()} == {"anchorhold", about}
    wanted = {name for name in files_in(SOURCE) if "__pycache__" not in name}
    assert files_in(installed / "anchorhold") == wanted
    assert {f"{about}/{name}" for name in ("METADATA", "entry_points.txt", "licenses/LICENSE")} <= files_in(installed)


def test_the_wheel_holds_the_files_that_are_no_code(installed: Path) -> None:
    held = files_in(installed / "anchorhold")
    assert {"py.typed", "reproduce/published.csv", "config/toml/base.toml", "config/toml/hm-lga.toml"} <= held
    assert {f"report/templates/{name}" for name in ("audit.html", "base.html", "page.js", "style.css")} <= held


def test_the_sdist_has_what_a_contributor_needs(sdist: Path) -> None:
    held = files_in(sdist)
    pages = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "LICENSE"}
    assert pages | {"pyproject.toml", "start", "constraints.txt", "tests/conftest.py", "docs/extending.md"} <= held
    assert os.access(sdist / "start", os.X_OK)
    assert {"src/anchorhold/version.py", "examples", "benchmarks"} <= held | {name.partition("/")[0] for name in held}
    assert {name for name in held if name.startswith("src/")} == {
        f"src/anchorhold/{name}" for name in files_in(SOURCE) if "__pycache__" not in name
    }
    assert not any(name.startswith(("results/", ".venv/", ".github/")) or "__pycache__" in name for name in held)


def test_no_packaged_file_is_large(sdist: Path, installed: Path) -> None:
    large = [path for folder in (sdist, installed) for path in folder.rglob("*") if path.stat().st_size > LARGEST]
    assert not large


def test_the_metadata_say_what_pyproject_says(installed: Path) -> None:
    about = installed / f"anchorhold-{__version__}.dist-info"
    metadata = message_from_string((about / "METADATA").read_text(encoding="utf-8"))
    assert (metadata["Name"], metadata["Version"]) == ("anchorhold", __version__)
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    assert "anchorhold = anchorhold.__main__:main" in (about / "entry_points.txt").read_text(encoding="utf-8")


def test_the_installed_copy_runs_without_the_source(installed: Path, tmp_path: Path) -> None:
    told = python("-c", "import anchorhold as a; print(a.__file__, a.__version__)", cwd=tmp_path, path=str(installed))
    assert told.split() == [str(installed / "anchorhold" / "__init__.py"), __version__]
    listed = python("-m", "anchorhold", "recipes", cwd=tmp_path, path=str(installed))
    recipes = {path.stem for path in (SOURCE / "config" / "toml").glob("*.toml")} - {"base"}
    assert {line.split()[0] for line in listed.splitlines()} == recipes
    rows = python("-m", "anchorhold", "recipes", "rows", "t6/cub", cwd=tmp_path, path=str(installed))
    assert "t6/cub" in rows


def test_pip_installs_the_wheel_in_a_clean_environment_and_the_demo_runs(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "clean"
    venv.create(home, with_pip=True, symlinks=True)
    own = next(home.glob("lib/python*/site-packages"))
    # What Anchorhold needs is found where it is installed, since no network may be there; Anchorhold itself is not.
    (own / "needed.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ANCHORHOLD"))}

    def done(*command: str) -> str:
        made = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert made.returncode == 0, made.stdout + made.stderr
        return made.stdout

    inside = str(home / "bin")
    done(f"{inside}/python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel))
    where = done(f"{inside}/python", "-c", "import anchorhold; print(anchorhold.__file__)").strip()
    assert Path(where).is_relative_to(home)
    assert done(f"{inside}/anchorhold", "--version").split() == ["anchorhold", __version__]
    told = done(f"{inside}/anchorhold", "demo")
    assert "natural" in told and "robust" in told
    assert (tmp_path / "runs" / "demo" / "demo.json").is_file()
