"""A network that you have, hardened in a training loop of your own: plain PyTorch, and adversarial batches.

The loop goes on from a network that was trained with a loss of pytorch-metric-learning. With `ah.adversary` it trains
on triplets of hardness manipulation (HM[S, LGA]); without, on clean images as before. R@1 under attack is measured each
time, on classes that training has not seen. It takes about 15 seconds on one core:

    python examples/own_loop.py
"""

import copy

import torch
from pytorch_metric_learning.losses import MultiSimilarityLoss
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import anchorhold as ah


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(576, 64)
    )


def train(model: nn.Module, images: Tensor, labels: Tensor, robust: bool, epochs: int) -> None:
    loader = DataLoader(TensorDataset(images, labels), batch_size=128, shuffle=True)
    loss_function, optimiser = MultiSimilarityLoss(), torch.optim.Adam(model.parameters(), lr=1e-3)
    state: dict[str, Tensor] = {}  # LGA remembers the loss of the step before; save it with your checkpoint
    for _ in range(epochs):
        for x, y in loader:
            if robust:
                batch = ah.adversary(model, x, y, "hm-lga", state=state, eps=0.2, alpha=0.07, steps=5)
                x, y = batch.images, batch.labels
            optimiser.zero_grad()
            loss_function(model(x), y).backward()
            optimiser.step()


def recall(model: nn.Module, data: ah.Dataset) -> tuple[float, float]:
    """R@1 on the test classes in percent, clean and when every query is attacked with ε = 0.1."""
    found = ah.audit(
        model, data, attacks=["margin"], limit=200, steps=10, eps=0.1, alpha=0.025, examine=None, device="cpu"
    )
    return found.clean["R@1"].value, found.protocols["corrected"].columns["margin"].value


def main() -> dict[str, tuple[float, float]]:
    data = ah.dataset("digits")
    assert data.train.images is not None
    images, labels = data.train.images.permute(0, 3, 1, 2).float() / 255, data.train.labels
    torch.manual_seed(0)
    model = network()
    train(model, images, labels, robust=False, epochs=5)
    found = {"before": recall(model, data)}
    for name in ("natural", "robust"):
        other = copy.deepcopy(model)
        train(other, images, labels, robust=name == "robust", epochs=6)
        found[name] = recall(other, data)
    for name, (clean, attacked) in found.items():
        print(f"{name:8} R@1 {clean:5.1f}, under attack {attacked:5.1f}")
    return found


if __name__ == "__main__":
    main()
