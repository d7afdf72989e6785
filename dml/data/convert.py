"""Weights that another framework published, into the file that a backbone loads as `imagenet`."""

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from omegaconf import DictConfig

from dml.data.preparation import given
from dml.errors import UserError
from dml.files import atomic_path
from dml.models.backbones import googlenet_v1
from dml.models.backbones.inception import caffe_names
from dml.models.backbones.trained import backbone_of
from dml.models.caffe import LARGEST, read_caffemodel
from dml.models.weights import weights_folder

PUBLISHED = {"googlenet_v1": googlenet_v1.PUBLISHED}


def convert(name: str, config: DictConfig, sources: Sequence[str]) -> Path:
    """The file of a backbone's ImageNet weights, made of a .caffemodel if it is not there.

    Args:
        name: of the backbone.
        config: composed with it: `backbone.weights_dir` is where the file goes.
        sources: the .caffemodel, a path or a URL.

    Raises:
        UserError: a backbone whose weights need no converting, no source or several, a source that is not of the
            backbone, or a file that is there and does not fit. Nothing is left where the file was to be.
    """
    if name not in PUBLISHED:
        raise UserError(f"weights={name} are not made of a .caffemodel: choose {', '.join(PUBLISHED)}.")
    path = weights_folder(config.backbone.weights_dir) / PUBLISHED[name].files[0]
    if path.exists():
        config.backbone.weights = str(path)
        backbone_of(config.backbone)
        print(f"{path} is there already.")
        return path
    if len(sources) != 1:
        raise UserError(f"weights={name} takes one source: {PUBLISHED[name].by_hand}.")
    downloads = path.with_name(f".{path.name}.downloads")
    path.parent.mkdir(parents=True, exist_ok=True)
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
    said = "as it was" if known else "which is not the one that was"
    print(f"{path}: {len(weights)} tensors of {source.name}, {said} published.")
    shutil.rmtree(downloads, ignore_errors=True)
    return path
