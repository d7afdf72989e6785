"""Trains a ResNet-20 to classify CIFAR-100: the backbone that GSP's CIFAR Collage starts from (section 2.2).

    python experiments/gsp/pretrain.py

It trains on the official training images (4-pixel padded crops, flips) and writes the weights where
`experiment=collage` looks for them: weights/resnet20_cifar100.pth in the data folder (DML_DATA, else data). A JSON
beside them has the accuracy on the official test images after each epoch. The same command resumes a training that was
stopped.

The paper mentions this training without its settings. Here it is SGD with Nesterov momentum, weight decay 5e-4, and one
cycle of the learning rate with the momentum moving against it, 0.85 to 0.95 (Smith & Topin 2019). Any number of epochs
therefore works; 200 are usual on a GPU. All 100 classes are used, also those whose images the collage tests.

experiments/gsp/resnet20_cifar100.pth is what `--epochs 15` came to (45 minutes on one core): copy it to weights/
of the data folder instead of training it again.
"""

import argparse
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint, TQDMProgressBar
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from dml.configuration.command_line import ending
from dml.configuration.ranges import Count, NotNegative, Positive, Seed, Size, check_value
from dml.data.cifar import IMAGES, Cifar100, cifar100
from dml.errors import UserError
from dml.files import write_atomically
from dml.models.backbones.resnet_cifar import resnet20
from dml.training.trainer import WholeCheckpoints

PADDING = 4
ACCURACY = "test/accuracy"


class Batches(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches `[B,3,32,32]` of bytes and their classes `[B]`; in training shuffled, shifted and flipped."""

    def __init__(self, images: np.ndarray, classes: np.ndarray, batch: int, *, training: bool, seed: int) -> None:
        self.images = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
        self.classes = torch.from_numpy(classes)
        self.batch, self.training, self.seed = batch, training, seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.classes) // self.batch if self.training else -(-len(self.classes) // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed * 100_003 + self.epoch)
        count = len(self.classes)
        order = torch.randperm(count, generator=generator) if self.training else torch.arange(count)
        for rows in order.split(self.batch)[: len(self)]:
            images = self.images[rows]
            yield self._moved(images, generator) if self.training else images, self.classes[rows]

    def _moved(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Shifts each image by up to `PADDING` pixels, reflected at the border, and flips half of them."""
        batch, _, side, _ = images.shape
        padded = F.pad(images.float(), [PADDING] * 4, mode="reflect").to(torch.uint8)
        corner = torch.randint(2 * PADDING + 1, (2, batch, 1), generator=generator)
        cells = torch.arange(side)
        rows, columns = corner[0] + cells, corner[1] + cells
        flipped = torch.rand(batch, 1, generator=generator) < 0.5
        columns = torch.where(flipped, columns.flip(1), columns)
        return padded[torch.arange(batch)[:, None, None], :, rows[:, :, None], columns[:, None, :]].movedim(3, 1)


class Classifier(pl.LightningModule):
    """ResNet-20, global average pooling and a linear layer."""

    def __init__(self, classes: int, lr: float, weight_decay: float) -> None:
        super().__init__()
        self.backbone = resnet20()
        self.linear = nn.Linear(self.backbone.dim, classes)
        self.lr, self.weight_decay = lr, weight_decay
        self.hits = self.seen = 0
        self.accuracy: list[float] = []

    def forward(self, images: Tensor) -> Tensor:
        """Bytes `[B,3,32,32]` -> logits `[B,C]`."""
        images = images.to(torch.float32, memory_format=torch.channels_last) / 255
        return self.linear(self.backbone(self.backbone.normalize(images)).mean((2, 3)))

    def on_train_epoch_start(self) -> None:
        loader = self.trainer.train_dataloader
        assert loader is not None
        loader.dataset.epoch = self.current_epoch

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, classes = batch
        loss = F.cross_entropy(self(images), classes)
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        self.hits = self.seen = 0

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        images, classes = batch
        self.hits += int((self(images).argmax(1) == classes).sum())
        self.seen += len(classes)

    def on_validation_epoch_end(self) -> None:
        self.accuracy.append(self.hits / self.seen)
        self.log(ACCURACY, self.accuracy[-1], prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(
            self.parameters(), self.lr, momentum=0.9, nesterov=True, weight_decay=self.weight_decay
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.lr, total_steps=int(self.trainer.estimated_stepping_batches), pct_start=0.2
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["accuracy"] = self.accuracy

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.accuracy = list(checkpoint["accuracy"])


def train(data: Cifar100, out: Path, *, epochs: int, batch: int, lr: float, weight_decay: float, seed: int) -> float:
    """Trains or resumes; writes the weights `out` and a JSON beside them. Returns the accuracy on the test images."""
    pl.seed_everything(seed, verbose=False)
    module = Classifier(len(data.class_names), lr, weight_decay).to(memory_format=torch.channels_last)
    train, test = (
        DataLoader(Batches(data.images[rows], data.classes[rows], size, training=training, seed=seed), batch_size=None)
        for rows, size, training in ((data.train, batch, True), (~data.train, 500, False))
    )
    states = out.parent / f".{out.stem}-{epochs}-{batch}-{lr}-{weight_decay}-{seed}"  # of these settings alone
    last = states / "last.ckpt"
    every_epoch = ModelCheckpoint(states, filename="last", enable_version_counter=False)
    trainer = pl.Trainer(
        max_epochs=epochs,
        devices=1,  # batches are not divided among ranks
        logger=False,
        callbacks=[every_epoch, TQDMProgressBar(refresh_rate=20)],
        plugins=[WholeCheckpoints()],
        num_sanity_val_steps=0,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")  # as when it resumes
        warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")  # harmless without workers
        trainer.fit(module, train, test, ckpt_path=last if last.exists() else None, weights_only=True)
    beside = out.with_name(f"{out.name}.part")
    torch.save({f"backbone.{name}": value for name, value in module.backbone.state_dict().items()}, beside)
    beside.replace(out)
    told = {"accuracy": module.accuracy, "epochs": epochs, "batch": batch, "lr": lr, "weight_decay": weight_decay}
    write_atomically(out.with_suffix(".json"), json.dumps(told | {"seed": seed}, indent=1) + "\n")
    return module.accuracy[-1]


def check(options: argparse.Namespace) -> None:
    """Raises UserError for options that would fail later."""
    ranges = {"epochs": Count, "batch": Size, "seed": Seed, "lr": Positive, "weight_decay": NotNegative}
    for name, annotation in ranges.items():
        check_value(f"--{name.replace('_', '-')}", getattr(options, name), annotation)
    if options.batch > IMAGES["train"]:
        raise UserError(f"--batch={options.batch} is more than the {IMAGES['train']:,} training images.")
    if options.out.suffix in ("", ".json") or options.out.is_dir():
        raise UserError(
            f"--out={options.out} has to be a file such as resnet20_cifar100.pth: a .json is written beside it."
        )
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out={options.out} cannot be written ({error.strerror}): choose another.") from None


@ending()
def main() -> None:
    here = Path(os.environ.get("DML_DATA", "data"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=str(here / "cifar-100"), help="folder of CIFAR-100, binary or Python layout")
    parser.add_argument("--out", type=Path, default=here / "weights" / "resnet20_cifar100.pth")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.2, help="the highest learning rate of the cycle")
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    check(options)
    accuracy = train(
        cifar100(options.data),
        options.out,
        epochs=options.epochs,
        batch=options.batch,
        lr=options.lr,
        weight_decay=options.weight_decay,
        seed=options.seed,
    )
    print(f"{options.out}: {accuracy:.2%} of the test images right after {options.epochs} epochs")


if __name__ == "__main__":
    main()
