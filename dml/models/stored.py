"""What the frozen first stages of a network made of images, kept and handed on in place of the images."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dml.models.tokens import TokenMap


class Stored(Tensor):
    """Features of B images, `[B,P+h*w,C]`: P tokens, then the cells of the map row by row.

    `Stages` that are given these in place of images go on behind `stage`.

    Attributes:
        stage: the last stage that they have passed.
        tokens: P.
        height: h.
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
        """Parts of a batch, and the batch elsewhere, are stored features too."""
        out = super().__torch_function__(func, types, args, kwargs or {})
        first = next((one for one in args if isinstance(one, cls)), None)
        for one in out if isinstance(out, tuple | list) else [out]:
            if first is not None and isinstance(one, cls):
                vars(one).update(vars(first))
        return out

    def map(self) -> Tensor:
        """`[B,C,h,w]` in channels-last order, with its tokens beside it."""
        with torch._C.DisableTorchFunctionSubclass():
            sequence = self.as_subclass(Tensor)
        cells = sequence[:, self.tokens :].unflatten(1, (self.height, -1)).permute(0, 3, 1, 2)
        return TokenMap.of(cells, sequence[:, : self.tokens]) if self.tokens else cells
