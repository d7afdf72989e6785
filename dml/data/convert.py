"""Converts weights that another framework published into the file that a backbone loads as `imagenet`."""

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from omegaconf import DictConfig

from dml.data.preparation import given
from dml.errors import UserError
from dml.files import alone, atomic_path
from dml.models.backbones import googlenet_v1
from dml.models.backbones.inception import caffe_names
from dml.models.backbones.trained import backbone_of
from dml.models.caffe import LARGEST, read_caffemodel
from dml.models.weights import weights_folder

PUBLISHED = {"googlenet_v1": googlenet_v1.PUBLISHED}


def convert(name: str, config: DictConfig, sources: Sequence[str]) -> Path:
    """Returns the path of a backbone's ImageNet weights, and makes the file from a .caffemodel if it is missing.

    Args:
        name: of the backbone.
        config: composed with this backbone; the file goes into `backbone.weights_dir`.
        sources: one .caffemodel, a path or a URL.

    Raises:
        UserError: the backbone's weights need no conversion, there is not exactly one source, the source is not of this
            backbone, or the existing file does not fit it. No incomplete file is left behind.
    """
    if name not in PUBLISHED:
        raise UserError(f"weights={name} needs no conversion from a .caffemodel: choose {', '.join(PUBLISHED)}.")
    path = weights_folder(config.backbone.weights_dir) / PUBLISHED[name].files[0]
    if path.exists():
        config.backbone.weights = str(path)
        backbone_of(config.backbone)
        print(f"{path} is there already.")
        return path
    if len(sources) != 1:
        raise UserError(f"weights={name} takes exactly one source=FILE: {PUBLISHED[name].by_hand}.")
    downloads = path.with_name(f".{path.name}.downloads")
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone(path.with_name(f".{path.name}.lock")):  # another process may be at the same downloads
        (source,) = given(sources[0], downloads, at_most=LARGEST)
        config.backbone.weights = "none"
        backbone = backbone_of(config.backbone)
        ours = backbone.state_dict()
        shapes = {theirs: ours[key].shape for theirs, key in caffe_names(backbone.stages).items()}
        weights = read_caffemodel(source, shapes)
        with atomic_path(path) as new, new.open("wb") as file:
            torch.save(weights, file)
            file.flush()
            os.fsync(file.fileno())
        digest = hashlib.sha1(source.read_bytes(), usedforsecurity=False).hexdigest()
        known = digest == PUBLISHED[name].sha1
        said = "which is the published file" if known else "which differs from the published file"
        print(f"{path}: {len(weights)} tensors of {source.name}, {said}.")
        shutil.rmtree(downloads, ignore_errors=True)
    return path
