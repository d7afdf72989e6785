"""Types and ranges of the options of library components, whose own annotations have no range or are missing."""

from typing import Annotated, Any, Literal

from pydantic import Field

from dml.configuration.ranges import (
    BelowOne,
    Count,
    Few,
    NotNegative,
    Pixels,
    Positive,
    Share,
    Sharpness,
    Size,
    WholeNumber,
)

Strength = Annotated[float, Field(ge=0, le=100)]  # of a change of colours; 0: none

Turn = Annotated[float, Field(ge=-0.5, le=0.5)]  # of the circle of hues

Degrees = Annotated[float, Field(ge=-360, le=360)]

Level = Annotated[float, Field(ge=0, le=255)]  # of a colour

# Library module -> parameter -> annotation, for parameters that the library annotates without a range or not at all.
LIBRARIES: dict[str, dict[str, Any]] = {
    "torch.optim.lr_scheduler": {
        "milestones": Annotated[list[Count], Field(min_length=1)],
        **dict.fromkeys(("step_size", "T_0", "T_mult", "step_size_up", "step_size_down"), Count),
        **dict.fromkeys(("total_iters", "patience", "cooldown"), WholeNumber),
        **dict.fromkeys(("factor", "start_factor", "end_factor", "pct_start", "threshold"), Share),
        **dict.fromkeys(("gamma", "div_factor", "final_div_factor", "power"), Positive),
        **dict.fromkeys(("base_momentum", "max_momentum"), BelowOne),
        "eps": NotNegative,
        "anneal_strategy": Literal["cos", "linear"],
        "mode": Literal["min"],  # of the training loss
        "threshold_mode": Literal["rel", "abs"],
        **dict.fromkeys(("cycle_momentum", "three_phase"), bool),
    },
    "torch.optim": {
        "lr": Positive,
        "betas": tuple[BelowOne, BelowOne],
        "eps": Positive,
        "weight_decay": Annotated[float, Field(ge=0, le=1e3)],
        "momentum": BelowOne,
        "dampening": Share,
        "alpha": Share,
        "nesterov": bool,
    },
    "pytorch_lightning.callbacks": {
        "decay": BelowOne,
        "use_buffers": bool,
        "update_every_n_steps": Count,
        "update_starting_at_step": WholeNumber | None,
    },
    "torchvision.transforms": {
        "p": Share,
        "size": Pixels | tuple[Pixels, Pixels],
        "scale": tuple[Positive, Positive],
        "ratio": tuple[Positive, Positive],
        **dict.fromkeys(("brightness", "contrast", "saturation"), Strength | tuple[Strength, Strength] | None),
        "hue": Annotated[float, Field(ge=0, le=0.5)] | tuple[Turn, Turn] | None,
        "degrees": Degrees | tuple[Degrees, Degrees],
        "translate": tuple[Share, Share] | None,
        "num_ops": Few,
        "magnitude": Annotated[int, Field(ge=0, le=1023)],
        "num_magnitude_bins": Annotated[int, Field(ge=2, le=1024)],
        **dict.fromkeys(("fill", "value"), Level | tuple[Level, Level, Level] | None),
        "interpolation": Literal["nearest", "bilinear", "bicubic"],
    },
    "torch.nn": {"output_size": Annotated[int, Field(ge=1, le=1)]},  # of adaptive pooling: heads take a vector
    "pytorch_metric_learning": {
        **dict.fromkeys(
            ("margin", "m", "pos_margin", "neg_margin", "nu", "cutoff", "nonzero_loss_cutoff"), NotNegative
        ),
        **dict.fromkeys(("alpha", "beta", "gamma", "la", "scale", "temperature", "softmax_scale"), Sharpness),
        **dict.fromkeys(("centers_per_class", "sub_centers"), Few),
        "angle": Annotated[float, Field(ge=0, le=180)],
        **dict.fromkeys(("embedding_reg_weight", "weight_reg_weight"), NotNegative),
        **dict.fromkeys(("num_classes", "memory_size"), Annotated[int, Field(ge=1, le=10**7)]),
        "embedding_size": Size,
        "learn_beta": bool,
        "type_of_triplets": Literal["all", "hard", "semihard", "easy"],
        "triplets_per_anchor": Literal["all"] | Count,
        **dict.fromkeys(("pos_strategy", "neg_strategy"), Literal["easy", "semihard", "hard", "all"]),
    },
}
