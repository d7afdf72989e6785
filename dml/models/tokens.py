"""Maps of patch tokens that carry the class token and the register tokens along.

A transformer's block needs both. Methods see a map `[B,C,h,w]` like a convolutional one: they mask it, cut it, repeat
it for their learners, and hand it to the next stage. The results of these operations still carry the tokens of their
images.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

# Operations that keep the images in order, or repeat each image for its learners. Any other operation drops the tokens,
# and the next block raises an error: the tokens of other images would be silently wrong.
CARRY = frozenset(
    (
        *("mul", "add", "sub", "div", "interpolate", "contiguous", "clone"),
        *("unsqueeze", "expand", "flatten", "unflatten", "reshape", "view"),
        *("to", "float", "double", "half", "bfloat16"),
    )
)


class TokenMap(Tensor):
    """Patch tokens as a map, `[B,C,h,w]`, or the maps of L learners, `[B,L,C,h,w]` or `[B*L,C,h,w]`.

    Attributes:
        tokens: `[A,P,C]`, the other tokens; A is B if the learners of an image share its tokens, else B*L.
    """

    tokens: Tensor

    @classmethod
    def of(cls, patches: Tensor, tokens: Tensor) -> "TokenMap":
        """Makes a map of patches that carries the tokens along."""
        made = patches.as_subclass(cls)
        made.tokens = tokens
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            name = getattr(func, "__name__", "")
            if name in CARRY and isinstance(out, Tensor):
                return cls.of(out, next(one.tokens for one in args if isinstance(one, cls)))
            if name == "stack" and (kwargs or {}).get("dim") == 1 and all(isinstance(one, cls) for one in args[0]):
                return cls.of(out, torch.stack([one.tokens for one in args[0]], dim=1).flatten(0, 1))
            if name == "__getitem__" and isinstance(args[1], tuple) and args[1][0] == slice(None) and len(args[1]) == 2:
                if args[1][1] is None:
                    return cls.of(out, args[0].tokens)
                if isinstance(args[1][1], int):
                    return cls.of(out, args[0]._of_learner(args[1][1]))
            if name == "unbind" and args[1:] == (1,):
                return tuple(cls.of(one, args[0]._of_learner(i)) for i, one in enumerate(out))
        return out

    def _of_learner(self, learner: int) -> Tensor:
        """Returns the tokens `[B,P,C]` of one learner of a map `[B,L,C,h,w]`."""
        images, learners = self.shape[:2]
        return self.tokens if len(self.tokens) == images else self.tokens.unflatten(0, (images, learners))[:, learner]


def taken(features: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Separates a map into its patches `[B,C,h,w]` and its `count` tokens `[B,count,C]`.

    Raises:
        RuntimeError: the map has lost its tokens.
    """
    if not count:
        return features, features.new_zeros(len(features), 0, features.shape[1])
    # The compiler knows neither the length of such a map nor `as_subclass`, in place of which it is transposed.
    if not isinstance(features, TokenMap) or features.shape[0] % features.tokens.shape[0]:
        raise RuntimeError(
            "a map reached a transformer's block without the tokens of its images: an operation outside "
            "dml.models.tokens.CARRY dropped them"
        )
    each = features.shape[0] // features.tokens.shape[0]
    return features.transpose(1, 1), features.tokens.repeat_interleave(each, 0)


def entering(stage: Any, cells: Tensor) -> Tensor:
    """Prepares blank cells `[B,C,h,w]` for trying out a stage: adds tokens of zero if the stage expects tokens."""
    count = getattr(stage, "count", 0) if cells.shape[1] != 3 else 0
    return TokenMap.of(cells, cells.new_zeros(len(cells), count, cells.shape[1])) if count else cells
