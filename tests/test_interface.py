"""Messages name what the interface in use has: options on the command line, arguments in Python."""

import ast
import inspect
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from PIL import Image
from torch import Tensor, nn

import anchorhold as ah
from anchorhold.cli import main as cli
from anchorhold.cli.app import app
from anchorhold.interface import Placeholder, argument, command_line, option, setting, worded

PACKAGE = Path(ah.__file__).parent
OPTION = re.compile(r"(?<![\w-])--[a-z]")
KEYWORD = re.compile(r"(?<![\w.:\"/-])[a-z_]+=(?!=)")
CALL = re.compile(r"ah\.\w+\([^)]*\)*")  # code for a file of the user's, on either interface
WORDING = {"worded", "option", "argument", "setting"}
# They read the command line themselves, so that no other interface reaches them.
PARSERS = {"config/recipes.py parse_assignments", "training/sweeping.py parse_vary"}
# A user's own training loop, which no command has.
IN_PYTHON = {"training/own_loop.py"}
# Words that are no messages: the command on a report page, the marks in a Markdown page, arguments of git.
HTML = {"display.py", "report/charts.py"}  # texts that begin with < are elements there
PARTS = {"model/card.py _use", "cli/train.py _finished"}  # a part of a call that is put together
NO_MESSAGES = {"report/audit_page.py", "report/insert.py", "runs/provenance.py", "interface.py"}


def texts(node: ast.AST, inside: str) -> Iterator[tuple[str, str]]:
    """The texts of a file with the function they are in, less those that are worded for an interface."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id in WORDING:
            continue
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue  # a docstring
        name = child.name if isinstance(child, ast.FunctionDef | ast.ClassDef) else inside
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield name, child.value
        if isinstance(child, ast.JoinedStr):
            parts = (each.value if isinstance(each, ast.Constant) else "…" for each in child.values)
            yield name, "".join(str(part) for part in parts)
            for each in child.values:
                if isinstance(each, ast.FormattedValue):
                    yield from texts(each, name)
            continue
        yield from texts(child, name)


def found(folder_is_cli: bool) -> list[tuple[str, str, str]]:
    listed = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        if place.startswith("cli/") == folder_is_cli and place not in NO_MESSAGES:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            listed += [(place, name, text) for name, text in texts(tree, "") if " " in text.strip()]
    return listed


def test_no_message_outside_the_command_line_names_its_options() -> None:
    wrong = [f"{p}: {t}" for p, name, t in found(False) if OPTION.search(t) and f"{p} {name}" not in PARSERS]
    assert not wrong, "use option(), argument() or worded()"


def test_no_message_names_an_argument_of_python_outside_of_code() -> None:
    wrong = [
        f"{place}: {text}"
        for place, name, text in [*found(False), *found(True)]
        if KEYWORD.search(CALL.sub("", text))
        and place not in IN_PYTHON
        and f"{place} {name}" not in PARTS | PARSERS
        and not (place in HTML and text.startswith("<"))
    ]
    assert not wrong, "use option(), argument() or worded()"


def test_the_words_of_each_interface() -> None:
    python = (option("weights"), option("limit", 5), argument("batch"), setting("train.epochs", 3), worded("a", "b"))
    assert python == ("weights=", "limit=5", "batch", "overrides={'train.epochs': 3}", "b")
    with command_line():
        commands = (
            option("weights"),
            option("limit", 5),
            argument("batch"),
            setting("train.epochs", 3),
        )
        with command_line():
            assert argument("k") == "-k"
        assert argument("on_bad_image") == "--on-bad-image"
        assert worded("a", "b") == "a"
    assert commands == ("--weights", "--limit 5", "--batch", "--set train.epochs=3")
    assert argument("batch") == "batch"


@pytest.mark.parametrize("value", ["my runs", "it's", 'say "hi"', "RUNS", "a\nb", "-k", "$HOME", ""])
def test_a_value_of_yours_can_be_pasted(value: str) -> None:
    for text in (option("out", value), setting("data.root", value)):
        told = eval(f"dict({text})")
        assert told in ({"out": value}, {"overrides": {"data.root": value}})
    with command_line():
        assert shlex.split(option("out", value)) == ["--out", value]
        assert shlex.split(setting("data.root", value)) == ["--set", f"data.root={value}"]


def test_a_placeholder_has_no_quotes() -> None:
    assert option("weights", Placeholder("FILE")) == "weights=FILE"
    with command_line():
        assert option("weights", Placeholder("<FILE>")) == "--weights <FILE>"


# Wrong uses, in both interfaces -----------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 8)

    def forward(self, images: Tensor) -> Any:
        return self.last(images.flatten(1))


class Two(Net):
    def forward(self, images: Tensor) -> Any:
        vectors = super().forward(images)
        return {"a": vectors, "b": vectors}


MODULE = f"""
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("wrong_uses", {__file__!r})
this = importlib.util.module_from_spec(spec)
spec.loader.exec_module(this)
net, two = this.Net, this.Two
def normalised():
    return torch.randn(40, 1, 8, 8), torch.arange(40) // 4
"""
AUDIT = "audit mynet:net --data digits"


def audit(**given: Any) -> Callable[[], object]:
    return lambda: ah.audit(Net(), "digits", **given)


def fit(**given: Any) -> Callable[[], object]:
    return lambda: ah.fit(None, ah.dataset("digits"), **given)


WRONG: list[tuple[str, Callable[[], object], str, str]] = [
    ("train dgits", lambda: ah.dataset("dgits"), "did you mean digits?", "did you mean digits?"),
    ("train cub", lambda: ah.dataset("cub"), "cub needs --root:", "cub needs ah.dataset('cub', root=…):"),
    ("train cub", lambda: ah.fit(None, "cub"), "cub needs --root:", "cub needs ah.dataset('cub', root=…):"),
    ("train cub --dry-run", lambda: ah.estimate(None, "cub"), "cub needs --root:", "ah.dataset('cub', root=…):"),
    ("audit mynet:net --data sop", lambda: ah.audit(Net(), "sop"), "sop needs --root:", "ah.dataset('sop', root=…):"),
    ("train cub --root .", lambda: ah.dataset("cub", "."), "as --root", "as root"),
    ("train digits --root .", lambda: ah.dataset("digits", "."), "leave out --root", "leave out its root"),
    ("train csv", lambda: ah.dataset("csv"), "needs --root", "needs ah.dataset('csv', root=…)"),
    ("train folder", lambda: ah.dataset("folder"), "needs --root", "needs ah.dataset('folder', root=…)"),
    ("train half", lambda: ah.fit(None, "half"), "or give half/train", "or give half/train"),
    (
        "train bad --recipe natural --weights none",
        lambda: ah.fit(None, "bad", "natural", overrides={"model.weights": ""}),
        "with --set data.on_bad_image=skip",
        "with overrides={'data.on_bad_image': 'skip'}",
    ),
    ("audit mynet:net --data bad", lambda: ah.audit(Net(), "bad"), "--on-bad-image skip", "on_bad_image='skip'"),
    ("attack mynet:net 0 --data bad", lambda: ah.attack(Net(), "0", "bad"), "or remove it", "or remove it"),
    (
        "embed mynet:net bad --out i",
        lambda: ah.embed(Net(), "bad", "i"),
        "--on-bad-image skip",
        "on_bad_image='skip'",
    ),
    (
        "train digits --weights imagenet",
        lambda: ah.Embedder("small", weights="imagenet"),
        "as in --set model.weights=FILE, or none with --set model.weights=",
        "as in ah.Embedder(…, weights=FILE), or None",
    ),
    ("train digits --set device=cpu", fit(overrides={"device": "cpu"}), "with --device", "with device="),
    ("train digits --set out=a", fit(overrides={"out": "a"}), "with --out", "with out="),
    (
        "train digits --recipe hm --set defence.name=act",
        fit(recipe="hm", overrides={"defence.name": "act"}),
        "choose --recipe act",
        "choose recipe='act'",
    ),
    ("train digits --device tpu", fit(device="tpu"), "--device takes", "device takes"),
    ("train digits --device cuda:99", fit(device="cuda:99"), "--device cpu", "device='cpu'"),
    ("train digits --out mynet.py", fit(out="mynet.py"), "another --out", "another out="),
    ("train digits --set zzzz=1", fit(overrides={"zzzz": 1}), "`anchorhold settings`", "ah.list_settings()"),
    (
        "train mynet:normalised --model mynet:net",
        lambda: ah.fit(Net(), (torch.randn(40, 1, 8, 8), torch.arange(40) // 4)),
        "with --mean and --std",
        "ah.wrap(model, mean=…, std=…)",
    ),
    (f"{AUDIT} --limit -1", audit(limit=-1), "--limit must", "limit must"),
    (f"{AUDIT} --batch 0", audit(batch=0), "--batch must", "batch must"),
    (f"{AUDIT} --seeds 0", audit(seeds=0), "--seeds must", "seeds must"),
    (f"{AUDIT} --seeds 3", audit(seeds=3), "--threat adml", "threat='adml'"),
    (f"{AUDIT} --method bim", audit(method="bim"), "--method cannot be", "method cannot be"),
    (
        f"{AUDIT} --method cw --alpha 1/255",
        audit(method="cw", alpha=1 / 255),
        "leave out --alpha, or use --method pgd",
        "leave out alpha=, or use method='pgd'",
    ),
    (f"{AUDIT} --method fgsm --steps 3", audit(method="fgsm", steps=3), "leave out --steps", "leave out steps="),
    (f"{AUDIT} --strength hard", audit(strength="hard"), "--strength cannot", "strength cannot"),
    (f"{AUDIT} --surrogate mynet:net", audit(surrogate=Net()), "--strength strong", "strength='strong'"),
    (
        f"{AUDIT} --method fgsm --strength strong",
        audit(method="fgsm", strength="strong"),
        "leave out --method and --protocol",
        "leave out method= and protocols=",
    ),
    (f"{AUDIT} --protocol none", audit(protocols=("none",)), "--protocol cannot", "protocols cannot"),
    (
        "attack mynet:net 0 --data digits --protocol none",
        lambda: ah.attack(Net(), "0", "digits", protocol="none"),  # type: ignore[arg-type]
        "--protocol cannot",
        "protocol cannot",
    ),
    (
        "attack mynet:net 0 --data digits --goal CA*",
        lambda: ah.attack(Net(), "0", "digits", "CA*"),
        "did you mean CA-?",
        "did you mean CA-?",
    ),
    (f"{AUDIT} --attacks CA*", audit(attacks=["CA*"]), "did you mean CA-?", "did you mean CA-?"),
    (f"{AUDIT} --attacks CA+:q=2", audit(attacks={"CA+": {"q": 2}}), "it has w", "it has w"),
    (f"{AUDIT} --attacks ES --until 2", audit(attacks=["ES"], until=2), "out --attacks", "out attacks="),
    (f"{AUDIT} --until 0", audit(until=0), "--until must", "until must"),
    (f"{AUDIT} --eps 8", audit(eps=8), "8/255", "8/255"),
    (f"{AUDIT} --norm l1 --eps 1", lambda: ah.Threat(1, "l1"), "--norm", "norm cannot"),  # type: ignore[arg-type]
    (f"{AUDIT} --curve 8", audit(epsilons=[8]), "ε of --curve", "ε of epsilons"),
    (f"{AUDIT} --steps 0 --curve .1", audit(steps=0, epsilons=[0.1]), "out --curve", "out epsilons="),
    (f"{AUDIT} --classes some", audit(classes="some"), "--classes cannot", "classes cannot"),
    (f"{AUDIT} --classes all", audit(classes="all"), "--classes all", "classes='all'"),
    (f"{AUDIT} --precision half", audit(precision="half"), "--precision cannot", "precision cannot"),
    (f"{AUDIT} --compile 1", audit(compile="1"), "--compile must", "compile must"),
    (f"{AUDIT} --out mynet.py", audit(out="mynet.py"), "another --out", "another out="),
    (f"{AUDIT} --resize 8 --crop 20", audit(resize=8, crop=20), "--crop must", "crop must"),
    (
        "audit mynet:two --data digits",
        lambda: ah.audit(Two(), "digits"),
        "return ah.wrap(net, output='NAME') from your function",
        "use ah.wrap(net, output='NAME')",
    ),
    ("attack-list mynet:net --data digits -k 0", lambda: ah.attack_list(Net(), "digits", k=0), "-k must", "k must"),
    (
        "attack-list mynet:net --data digits --queries 0",
        lambda: ah.attack_list(Net(), "digits", queries=0),
        "--queries must",
        "queries must",
    ),
    ("embed mynet:net . --out i --batch 0", lambda: ah.embed(Net(), ".", "i", batch=0), "--batch must", "batch must"),
    (
        "embed mynet:net . --out i --on-bad-image x",
        lambda: ah.embed(Net(), ".", "i", on_bad_image="x"),  # type: ignore[arg-type]
        "--on-bad-image is",
        "on_bad_image is",
    ),
    ("search none a.png", lambda: ah.search("none", "a.png"), "`anchorhold embed`", "ah.embed"),
    ("search . a.png -k 0", lambda: ah.search(".", "a.png", k=0), "-k must", "k must"),
    ("search . a.png --backend x", lambda: ah.search(".", "a.png", backend="x"), "--backend is", "backend is"),  # type: ignore[arg-type]
    ("export mynet:net --out a.pt", lambda: ah.export(Net(), "a.pt"), "--out a.pt", "out='a.pt'"),
    ("resume none", lambda: ah.resume("none"), "run folder", "run folder"),
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mynet.py").write_text(MODULE, encoding="utf-8")
    for name in ("bad/a", "bad/b", "bad/c", "bad/d", "half/train/a"):
        (tmp_path / name).mkdir(parents=True)
        for copy in range(3):
            Image.new("RGB", (8, 8), (60 * copy, 90, 0)).save(tmp_path / name / f"{copy}.png")
    (tmp_path / "bad" / "b" / "1.png").write_text("no image")
    (tmp_path / "bad" / "c" / "1.png").write_text("no image")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mynet", raising=False)
    monkeypatch.delenv("ANCHORHOLD_DEBUG", raising=False)


@pytest.mark.parametrize(("line", "call", "command", "python"), WRONG, ids=[each[0] for each in WRONG])
def test_wrong_use_in_both_interfaces(
    line: str,
    call: Callable[[], object],
    command: str,
    python: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["anchorhold", *line.split()])
    with pytest.raises(SystemExit) as end:
        cli.main()
    told = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and told.startswith("error: "), told
    assert command in told and not KEYWORD.search(CALL.sub("", told)), told
    assert set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", told)) <= options_in(line, told), told
    with pytest.raises(ah.AnchorholdError) as error:
        call()
    assert python in str(error.value) and not OPTION.search(str(error.value)), error.value
    check_arguments(str(error.value), function_in(call))


def options_in(line: str, told: str) -> set[str]:
    """The options of the command, and of those that the message names."""
    commands: Any = typer.main.get_command(app)
    names = {line.split()[0], *re.findall(r"anchorhold ([a-z-]+)", told)}
    return {option for name in names for each in commands.commands[name].params for option in each.opts}


def function_in(call: Callable[[], object]) -> str:
    """The public function that is called: the first that its code names."""
    return next(name for name in call.__code__.co_names if name in ah.__all__)


def check_arguments(told: str, called: str) -> None:
    """What the message names as an argument is one, of the function that was called or of that which it names."""
    for name, inside in [*re.findall(r"ah\.(\w+)\(([^)]*)", told), (called, CALL.sub("", told))]:
        has = inspect.signature(getattr(ah, name)).parameters
        named = [*KEYWORD.findall(inside), *re.findall(r"(?:^|[;:] )([a-z_]+) (?:must|cannot be|takes) ", inside)]
        assert {each.rstrip("=") for each in named} <= set(has), told


def test_weights_that_cannot_be_downloaded(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    create = timm.create_model

    def offline(name: str, **given: Any) -> Any:
        if given["pretrained"]:
            raise OSError("no route to host")
        return create(name, **given)

    monkeypatch.setattr(timm, "create_model", offline)
    for line, way in (
        ("audit resnet18 --data digits", "resnet18=FILE"),
        ("embed timm:resnet18 bad --out i", "resnet18=FILE"),
        ("train bad", "--set model.weights=FILE, or none with --set model.weights="),
    ):
        monkeypatch.setattr(sys, "argv", ["anchorhold", *line.split()])
        with pytest.raises(SystemExit):
            cli.main()
        told = capsys.readouterr().err.splitlines()[-1]
        assert told.endswith(f"(no route to host); give a file, as in {way}"), told
        assert set(OPTION.findall(told)) <= {option[:3] for option in options_in(line, told)}
    calls: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: ah.load("timm:resnet18"), "ah.Embedder('resnet18', weights=FILE)"),
        (lambda: ah.Embedder("resnet18", weights="imagenet"), "ah.Embedder(…, weights=FILE), or None"),
        (
            lambda: ah.fit(None, "bad"),
            "overrides={'model.weights': FILE}, or none with overrides={'model.weights': ''}",
        ),
    )
    for call, way in calls:
        with pytest.raises(ah.AnchorholdError) as error:
            call()
        assert str(error.value).endswith(f"(no route to host); give a file, as in {way}")
        check_arguments(str(error.value), function_in(call))
