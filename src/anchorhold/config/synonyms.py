"""Names that other libraries use for our settings, for the error about a key that does not exist."""

import difflib
from collections.abc import Iterable

from ..errors import nearest
from ..interface import option, worded

__all__ = ["meant"]

_SYNONYMS = {
    "batch.pairs": "batch_size batch.size batchsize bs",
    "data.crop": "crop_size image_size img_size input_size imgsz size",
    "data.flip": "hflip horizontal_flip augment augmentation",
    "data.name": "dataset data_set",
    "data.resize": "resize_size resolution",
    "data.root": "data_dir data_path data_root path folder",
    "data.workers": "num_workers n_workers",
    "defence.alpha": "step_size stepsize attack_lr pgd_alpha",
    "defence.eps": "epsilon radius budget attack_eps pgd_eps",
    "defence.name": "method defense",
    "defence.norm": "p lp",
    "defence.sampler": "miner mining triplets",
    "defence.source": "sampler miner mining triplets",
    "defence.steps": "iters iterations n_steps num_steps pgd_steps attack_iters attack_steps nb_iter replays",
    "model.backbone": "arch architecture net network encoder trunk model_name model.name",
    "model.dim": "embedding_dim embedding_size embed_dim embed_size features",
    "model.freeze_batchnorm": "freeze_bn bn_freeze frozen_bn",
    "model.weights": "pretrained checkpoint init initialisation initialization",
    "optimiser.lr": "learning_rate learningrate base_lr rate",
    "optimiser.schedule": "scheduler lr_schedule lr_scheduler",
    "optimiser.weight_decay": "wd l2 decay regularisation regularization",
    "train.checkpoint_seconds": "save_every checkpoint_every save_interval",
    "train.ema": "ema_decay averaging swa",
    "train.epochs": "epoch num_epochs n_epochs max_epochs",
    "train.evaluate_every": "eval_every val_every eval_interval validate_every",
    "train.precision": "amp fp16 bf16 half dtype mixed_precision",
    "train.seed": "random_seed random_state manual_seed",
}
_ADAM = "optimiser.name is adam or adamw; optimiser.lr, optimiser.weight_decay and optimiser.schedule set it"
_ABSENT = {
    "beta1": "Adam's betas are fixed; there is optimiser.lr and optimiser.weight_decay",
    "betas": "Adam's betas are fixed; there is optimiser.lr and optimiser.weight_decay",
    "clip": "gradients are not clipped; lower optimiser.lr instead",
    "clip_grad": "gradients are not clipped; lower optimiser.lr instead",
    "early_stopping": "training does not stop early; set train.epochs",
    "grad_clip": "gradients are not clipped; lower optimiser.lr instead",
    "momentum": "training uses Adam, which has no momentum; there is optimiser.lr and optimiser.weight_decay",
    "optimizer": _ADAM,
    "optimizer.name": _ADAM,
    "patience": "training does not stop early; set train.epochs",
    "shuffle": "every epoch is shuffled, keyed by train.seed",
    "warmup": "optimiser.schedule=one-cycle has a warm-up; there is no other",
    "warmup_epochs": "optimiser.schedule=one-cycle has a warm-up; there is no other",
}

_ARGUMENTS = {"device": "the device", "out": "the run folder"}


def meant(key: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown key: what it is called here, or the nearest known key.

    >>> meant("train.learning_rate", ["optimiser.lr", "train.epochs"])
    'did you mean optimiser.lr?'
    """
    known = sorted(known)
    word = key.lower().replace("-", "_")
    last = word.rpartition(".")[2]
    for name in dict.fromkeys((word, last)):
        same = [each for each in known if each.endswith(f".{name}")]
        if len(same) == 1:  # the right key in the wrong section, or without one
            return f"did you mean {same[0]}?"
        for target, words in _SYNONYMS.items():
            if name in words.split() and target in known:
                return f"did you mean {target}?"
        if name in _ARGUMENTS:
            return f"{_ARGUMENTS[name]} is given with {option(name)}"
        if name in _ABSENT:
            return _ABSENT[name]
    parts = {each.rpartition(".")[2]: each for each in reversed(known)}
    close = difflib.get_close_matches(last[:200], parts, n=1)  # near the end of a key, where nothing is near the whole
    otherwise = (
        f"did you mean {parts[close[0]]}?"
        if close
        else f"{worded('`anchorhold settings`', 'ah.list_settings()')} lists them"
    )
    return nearest(key, known, otherwise)
