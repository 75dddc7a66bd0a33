"""Small worlds to attack: images, a smooth net onto the sphere, and the scene that they make."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from anchorhold.attacks.goal import Scene
from anchorhold.random import Key
from tests.analytic import tanh_embedder

Embed = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class World:
    embed: Embed
    images: Tensor  # (N, 1, 3, 3); the queries'
    gallery: Tensor  # the gallery's
    scene: Scene

    def side(self, name: str) -> Tensor:
        return self.images if name == "query" else self.gallery


def pictures(count: int, classes: int, name: str) -> tuple[Tensor, Tensor]:
    """Images around one prototype a class, and their labels in no order."""
    key, ids = Key.of(3), torch.arange(count)
    labels = key(name, "labels").integers(ids, classes)
    prototypes = key("prototypes").uniform(torch.arange(classes), (1, 3, 3))
    noise = key(name, "noise").uniform(ids, (1, 3, 3)) - 0.5
    return (0.2 + 0.6 * prototypes[labels] + 0.3 * noise).clamp(0, 1), labels


def world(count: int = 40, classes: int = 5, *, apart: bool = False) -> World:
    """Every image a query against all others; `apart`: queries against a gallery that holds only every third."""
    embed = tanh_embedder(9)
    images, labels = pictures(count, classes, "queries")
    if not apart:
        return World(embed, images, images, Scene.of(embed(images), labels))
    gallery, gallery_labels = pictures(count // 2, classes, "gallery")
    own = torch.full((count,), -1)
    shared = torch.arange(0, count // 2, 3)
    places = (shared + 7) % (count // 2)  # nobody has the same number on both sides
    gallery[places], gallery_labels[places], own[shared] = images[shared], labels[shared], places
    return World(embed, images, gallery, Scene(embed(gallery), gallery_labels, embed(images), labels, own))


def circle(x: Tensor) -> Tensor:
    """One pixel to the point of the unit circle at that angle: the nearer in x, the nearer in embedding."""
    angle = x.flatten(1)
    return torch.cat([angle.cos(), angle.sin()], 1)


def dial(*angles: float, labels: list[int] | None = None) -> World:
    """A world on the circle."""
    images = torch.tensor(angles, dtype=torch.float64).reshape(-1, 1, 1, 1)
    classes = torch.tensor(labels) if labels is not None else torch.arange(len(images))
    return World(circle, images, images, Scene.of(circle(images), classes))


def changed(embeddings: Tensor, size: float = 0.3) -> Tensor:
    """Embeddings a little off, as an attack would leave them."""
    noise = Key.of(5).normal(torch.arange(len(embeddings)), embeddings.shape[1:])
    return torch.nn.functional.normalize(embeddings + size * noise, dim=1)
