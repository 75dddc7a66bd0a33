"""Checks of this machine, for `anchorhold doctor` and for bug reports."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

__all__ = ["EXTRAS", "findings"]

EXTRAS = {
    "plots": ("plot", ("matplotlib",)),
    "onnx": ("export", ("onnx", "onnxscript", "onnxruntime")),
    "parquet": ("embed --parquet", ("pyarrow",)),
    "faiss": ("search --backend faiss", ("faiss",)),
    "losses": ("losses of pytorch-metric-learning", ("pytorch_metric_learning",)),
    "lora": ("train --set model.train=lora", ("peft",)),
    "encoders": ("models open_clip:… and transformers:…", ("open_clip", "transformers")),
    "tensorboard": ("train --track tensorboard", ("tensorboard",)),
}  # extra: (the command that needs it, its modules)


def findings() -> Iterator[tuple[str, str]]:
    """(sign, sentence) of each check: ✓ is fine, – is optional, ! is a warning, ✗ must be fixed."""
    yield (
        ("✓" if sys.version_info >= (3, 11) else "✗"),
        f"Python {platform.python_version()} on {platform.platform()}",
    )
    for name in ("anchorhold", "torch", "torchvision", "timm", "safetensors", "scikit-learn"):
        try:
            yield "✓", f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            if name == "anchorhold":
                yield "!", "anchorhold runs from its source tree; run `pip install .` there to install the command"
            else:
                yield "✗", f"{name} is not installed; install Anchorhold with pip, which installs it too"
    try:
        import torch
    except Exception as error:
        yield "✗", f"torch does not load: {error}"
        return
    yield "✓", f"{os.cpu_count()} CPU cores, torch uses {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16: set train.precision=fp32"
            yield "✓", f"GPU {index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB, {bf16}"
    else:
        yield "!", "no GPU: digits train in a minute on a CPU, but data sets of photographs need a GPU"
    try:
        import timm  # a torchvision built for another torch fails here, not at installation

        yield "✓", f"{len(timm.list_models())} timm backbones"
    except Exception as error:
        yield "✗", f"timm does not load ({error}); install matching versions of torch and torchvision"
    for extra, (needed, modules) in EXTRAS.items():
        missing = [name for name in modules if util.find_spec(name) is None]
        if missing:
            remedy = f"for {needed}, run pip install 'anchorhold[{extra}]'"
            yield "–", f"optional: {', '.join(missing)} not installed; {remedy}"
        else:
            yield "✓", f"optional: {', '.join(modules)}, for {needed}"
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    yield ("✓" if free > 2 else "!"), f"{free:.0f} GiB free in this folder, where runs are written ({Path.cwd()})"
