"""Small classifiers used as probes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class LeNet(nn.Module):
    """LeNet-5 with ReLU and max pooling, for any record of at least 8 x 8 pixels."""

    def __init__(self, shape: tuple[int, int, int], classes: int):
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=2)
        self.hidden1 = nn.Linear(32 * (height // 4) * (width // 4), 120)
        self.hidden2 = nn.Linear(120, 84)
        self.out = nn.Linear(84, classes)

    def forward(self, z: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(z)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.hidden1(x.flatten(1)))
        return self.out(F.relu(self.hidden2(x)))
