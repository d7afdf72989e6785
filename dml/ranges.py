"""What numbers may be: annotations of options, against which `dml.options.check` compares a configuration."""

from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(ge=1, le=10**9)]
WholeNumber = Annotated[int, Field(ge=0, le=10**9)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Size = Annotated[int, Field(ge=1, le=65536)]  # of a layer or a batch
Pixels = Annotated[int, Field(ge=1, le=8192)]
Few = Annotated[int, Field(ge=1, le=1024)]  # learners, clusters, layers
Positive = Annotated[float, Field(gt=0, le=1e30)]
NotNegative = Annotated[float, Field(ge=0, le=1e30)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]
Sharpness = Annotated[float, Field(gt=0, le=1e4)]  # what exponentials are taken of
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
