"""How long trainings of experiments take here."""

import json
import time
from collections import Counter
from collections.abc import Sequence

import torch
from tqdm import tqdm

from dml.configuration.trainings import trainings_of
from dml.papers.experiment import Training
from dml.papers.possible import checked
from dml.papers.trainings import each_once
from dml.training.build import build_method


def seconds_of(trainings: Sequence[Training]) -> float:
    """Estimates how many seconds the steps of all trainings take here, one after another.

    It times forward and backward passes of each distinct model on random images. Loading, the loss and evaluation are
    left out.

    Raises:
        UserError: an option has a value that is not allowed.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    timed: dict[str, float] = {}
    total = 0.0
    trainings = list(trainings)
    seeds = Counter(training.key for training in each_once(trainings))
    for training in tqdm({one.key: one for one in trainings}.values(), desc="estimating", leave=False):
        config = checked(f"{training.experiment}, {training.row}", training.overrides)
        config.backbone.weights = "none"
        config.runtime.train_classes = 100
        size = json.dumps([str(config[part]) for part in ("backbone", "head", "method", "image_size")])
        if size not in timed:
            method = build_method(config).to(device)
            images = torch.rand(8, 3, config.image_size, config.image_size, device=device)
            for _ in range(2):  # the second time counts: the first includes making buffers
                start = time.perf_counter()
                method.embed(images).sum().backward()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                timed[size] = (time.perf_counter() - start) / len(images)
        several = max(1, len(trainings_of(config))) * seeds[training.key]
        total += timed[size] * config.sampler.batch_size * config.trainer.max_steps * several
    return total
