"""The images of the vision experiment: Fashion-MNIST, or a folder of classes such as ImageNet."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from .hsa_fashion import fashion

#: Of the pixels of Fashion-MNIST, and of ImageNet by channel.
MEAN, DEVIATION = 0.286, 0.353
MEANS, DEVIATIONS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Fashion:
    """Fashion-MNIST; the last training images are kept apart for a search.

    Args:
        search: images kept apart.
        test: images of the test set that are read.
    """

    def __init__(self, search: int, test: int):
        images, labels = fashion("train")
        images = (images - MEAN) / DEVIATION
        self.train = images[:-search], labels[:-search]
        other, theirs = fashion("t10k")
        self.parts = {
            "search": (images[-search:], labels[-search:]),
            "test": ((other[:test] - MEAN) / DEVIATION, theirs[:test]),
        }

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of images [B, 1, 28, 28] and labels [B] without an end, pass after pass; half of them mirrored."""
        images, labels = self.train
        draw = torch.Generator().manual_seed(seed)
        while True:
            for rows in torch.randperm(len(labels), generator=draw).split(size)[
                : len(labels) // size
            ]:
                mirror = torch.rand(size, generator=draw) < 0.5
                yield (
                    torch.where(mirror[:, None, None, None], images[rows].flip(-1), images[rows]),
                    labels[rows],
                )

    def in_order(self, part: str, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All images of "search" or "test"."""
        return zip(*(x.split(size) for x in self.parts[part]), strict=True)


class Folder:
    """Images in train/CLASS/ and val/CLASS/; as many as are wanted of `train` are kept apart for a search.

    Args:
        folder: that holds both.
        search: images kept apart.
        test: images of `val` that are read.
        size: pixels a side.

    Raises:
        ValueError: the folder does not have both, with the same classes.
    """

    def __init__(self, folder: Path, search: int, test: int, size: int):
        files = {part: sorted(folder.glob(f"{part}/*/*")) for part in ("train", "val")}
        classes = [sorted({file.parent.name for file in part}) for part in files.values()]
        if not classes[0] or classes[0] != classes[1]:
            raise ValueError(
                f"--data {folder} has {len(classes[0])} classes in train, {len(classes[1])} in val; allowed: the same "
                "in both, as train/CLASS/FILE and val/CLASS/FILE"
            )
        for part in files.values():
            random.Random(0).shuffle(part)
        whole = [Images(files["train"], classes[0], size, train) for train in (True, False)]
        self.train = Subset(whole[0], range(search, len(whole[0])))
        self.parts = {
            "search": Subset(whole[1], range(search)),
            "test": Images(files["val"][:test], classes[0], size, False),
        }
        self.workers = min(16, os.cpu_count() or 1)

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of images [B, 3, size, size] and labels [B] without an end."""
        draw = torch.Generator().manual_seed(seed)
        loader = DataLoader(
            self.train, size, shuffle=True, generator=draw, num_workers=self.workers, drop_last=True
        )
        while True:
            yield from loader

    def in_order(self, part: str, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All images of "search" or "test"."""
        yield from DataLoader(self.parts[part], size, num_workers=self.workers)


class Images(Dataset):
    """Files as images [3, size, size] with the numbers of their classes.

    Args:
        train: a random part of the image, mirrored or not; else its middle.
    """

    def __init__(self, files: list[Path], classes: list[str], size: int, train: bool):
        self.files, self.size, self.train = files, size, train
        self.number = {name: i for i, name in enumerate(classes)}

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        file = self.files[index]
        with Image.open(file) as image:
            image = image.convert("RGB")
        box = self.part_of(*image.size)
        image = image.resize((self.size, self.size), Image.Resampling.BICUBIC, box=box)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(
            self.size, self.size, 3
        )
        pixels = (pixels / 255 - torch.tensor(MEANS)) / torch.tensor(DEVIATIONS)
        pixels = pixels.permute(2, 0, 1)
        mirror = self.train and torch.rand(()) < 0.5
        return pixels.flip(-1) if mirror else pixels.contiguous(), self.number[file.parent.name]

    def part_of(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of what is shown: a square of 7/8 of the shorter side in the middle, or in
        training 8 to 100 % of the area, from 3:4 to 4:3.
        """
        if not self.train:
            side = min(width, height) * 7 / 8
            left, top = (width - side) / 2, (height - side) / 2
            return left, top, left + side, top + side
        share, ratio = torch.rand(2).tolist()
        area, ratio = width * height * (0.08 + 0.92 * share), (3 / 4) ** (1 - 2 * ratio)
        wide, high = min(width, (area * ratio) ** 0.5), min(height, (area / ratio) ** 0.5)
        left, top = (torch.rand(2) * torch.tensor([width - wide, height - high])).tolist()
        return left, top, left + wide, top + high


def mixed(images: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Mixup (arXiv 1710.09412) with alpha 0.8 or CutMix (arXiv 1905.04899) with alpha 1, each for half of the batches.

    Args:
        images: [B, C, H, W].
        wanted: shares of the classes, [B, classes].
    """
    cut, other = torch.rand(()) < 0.5, torch.randperm(len(images), device=images.device)
    alpha = torch.tensor(1.0 if cut else 0.8)
    share = torch.distributions.Beta(alpha, alpha).sample().item()
    if cut:
        height, width = images.shape[-2:]
        high, wide = (round(side * (1 - share) ** 0.5) for side in (height, width))
        top, left = (int(torch.randint(side + 1, ())) for side in (height - high, width - wide))
        images = images.clone()
        box = (..., slice(top, top + high), slice(left, left + wide))
        images[box] = images[other][box]
        share = 1 - high * wide / (height * width)
    else:
        images = share * images + (1 - share) * images[other]
    return images, share * wanted + (1 - share) * wanted[other]
