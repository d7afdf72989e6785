"""A picture with its name and caption, whoever draws it."""

from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from dml.files import atomic_path


@dataclass(frozen=True)
class Plot:
    """A picture of a run.

    Attributes:
        name: of its file, and of its panel in W&B and TensorBoard.
        caption: one sentence without a full stop that says what is shown.
        figure: the picture itself.
    """

    name: str
    caption: str
    figure: Figure | Image.Image

    def save(self, path: Path) -> None:
        """Writes the picture as PNG."""
        with atomic_path(path) as new:
            if isinstance(self.figure, Figure):
                self.figure.savefig(new, format="png")
            else:
                self.figure.save(new, format="png")
