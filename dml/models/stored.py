"""Stored features: outputs of a network's frozen first stages that are used in place of images."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dml.models.tokens import TokenMap


class Stored(Tensor):
    """Features of B images, `[B,P+h*w,C]`: P tokens, then the cells of the map row by row.

    `Stages` that are given these in place of images continue after `stage`.

    Attributes:
        stage: the last stage that the images have passed.
        tokens: P, number of tokens.
        height: h, rows of the map.
    """

    stage: str
    tokens: int
    height: int

    @classmethod
    def of(cls, features: Tensor, stage: str, tokens: int, height: int) -> "Stored":
        made = features.as_subclass(cls)
        made.stage, made.tokens, made.height = stage, tokens, height
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Keeps the attributes on parts of a batch, and on a batch that is moved to another device."""
        out = super().__torch_function__(func, types, args, kwargs or {})
        first = next((one for one in args if isinstance(one, cls)), None)
        for one in out if isinstance(out, tuple | list) else [out]:
            if first is not None and isinstance(one, cls):
                vars(one).update(vars(first))
        return out

    def map(self) -> Tensor:
        """Returns the map `[B,C,h,w]` in channels-last order; its tokens are carried along."""
        with torch._C.DisableTorchFunctionSubclass():
            sequence = self.as_subclass(Tensor)
        cells = sequence[:, self.tokens :].unflatten(1, (self.height, -1)).permute(0, 3, 1, 2)
        return TokenMap.of(cells, sequence[:, : self.tokens]) if self.tokens else cells
